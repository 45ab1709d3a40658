use super::{Ending, Stream, TcpListener, ending, resolve};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Set in the process that is to be killed: where it connects to.
const CHILD: &str = "SKYSCHEDULE_TEST_CONNECT_TO";

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), 16)
        .await
        .unwrap();
    let at = listener.local_addr().unwrap();
    (listener, at)
}

/// A connection: the client's end, then the server's.
async fn pair() -> (Stream, Stream) {
    let (listener, at) = listener().await;
    let (client, accepted) = tokio::join!(Stream::connect(at), listener.accept());
    let (server, from) = accepted.unwrap();
    let client = client.unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
    assert_eq!(client.peer_addr().unwrap(), at);
    (client, server)
}

/// Reads to the end: what came, and how it ended.
async fn read_to_end(stream: &mut Stream) -> (Vec<u8>, Ending) {
    let mut all = Vec::new();
    loop {
        let mut buffer = [0; 64];
        let read = stream.read(&mut buffer).await;
        if let Some(ending) = ending(&read) {
            return (all, ending);
        }
        all.extend_from_slice(&buffer[..read.unwrap()]);
    }
}

#[tokio::test]
async fn a_dropped_client_stream_ends_with_a_reset() {
    let (client, mut server) = pair().await;
    drop(client);
    assert_eq!(read_to_end(&mut server).await, (vec![], Ending::Reset));
}

#[tokio::test]
async fn a_write_that_fails_does_not_make_a_fin_of_a_reset() {
    let (mut client, mut server) = pair().await;
    client.write_all(b"before").await.unwrap();
    drop(client);
    // The reset comes at some time, and the system tells the first who asks.
    while server.write_all(b"answer").await.is_ok() {
        tokio::task::yield_now().await;
    }
    let ended = read_to_end(&mut server).await;
    assert_eq!(ended, (b"before".to_vec(), Ending::Reset));
}

#[tokio::test]
async fn shutdown_alone_sends_no_fin() {
    let (mut client, mut server) = pair().await;
    client.write_all(b"before").await.unwrap();
    client.shutdown().await.unwrap();
    client.write_all(b" after").await.unwrap();
    let mut got = [0; 12];
    server.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"before after");
    drop(client);
    assert_eq!(read_to_end(&mut server).await, (vec![], Ending::Reset));
}

#[tokio::test]
async fn an_announced_end_is_a_fin_after_all_that_was_written() {
    let (mut client, mut server) = pair().await;
    client.write_all(b"goodbye").await.unwrap();
    client.end_with_fin();
    client.shutdown().await.unwrap();
    assert_eq!(
        read_to_end(&mut server).await,
        (b"goodbye".to_vec(), Ending::Fin)
    );
    drop(server);
    assert_eq!(read_to_end(&mut client).await, (vec![], Ending::Fin));

    let (mut client, mut server) = pair().await;
    client.end_with_fin();
    drop(client);
    assert_eq!(read_to_end(&mut server).await, (vec![], Ending::Fin));
}

#[tokio::test]
async fn a_dropped_server_stream_ends_with_a_fin() {
    let (mut client, server) = pair().await;
    drop(server);
    assert_eq!(read_to_end(&mut client).await, (vec![], Ending::Fin));
}

#[tokio::test]
async fn a_killed_client_process_shows_a_fin() {
    if let Ok(at) = std::env::var(CHILD) {
        return be_the_child(at.parse().unwrap()).await;
    }
    let (listener, at) = listener().await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "env::net::tests::a_killed_client_process_shows_a_fin",
        ])
        .env(CHILD, at.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    let mut greeting = [0; 5];
    server.read_exact(&mut greeting).await.unwrap();
    child.kill().unwrap();
    assert_eq!(read_to_end(&mut server).await, (vec![], Ending::Fin));
    child.wait().unwrap();
}

/// What this test does in the process that it starts and kills.
async fn be_the_child(server: SocketAddr) {
    let mut client = Stream::connect(server).await.unwrap();
    client.write_all(b"hello").await.unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_port_may_be_listened_at_again_at_once() {
    let (listener, at) = listener().await;
    let (client, accepted) = tokio::join!(Stream::connect(at), listener.accept());
    let (mut client, server) = (client.unwrap(), accepted.unwrap().0);
    // The server closes first: its side of the connection stays in TIME_WAIT.
    drop((server, listener));
    assert_eq!(read_to_end(&mut client).await.1, Ending::Fin);
    client.end_with_fin();
    drop(client);
    TcpListener::bind(at, 16).await.unwrap();
}

#[tokio::test]
async fn names_resolve_to_addresses_and_bad_ones_to_an_error() {
    assert_eq!(
        resolve("127.0.0.1:9991").await.unwrap(),
        [SocketAddr::from(([127, 0, 0, 1], 9991))]
    );
    assert!(
        resolve("localhost:80")
            .await
            .unwrap()
            .iter()
            .all(|address| address.ip().is_loopback())
    );
    resolve("no-port").await.unwrap_err();
}
