//! The roles of the server: the real one, and what it is compared with.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use redb::{Database, TableDefinition};
use serde_json::json;
use skyschedule_common::env;
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_server::Server;
use skyschedule_server::config::{Config, User};
use skyschedule_server::state::Settings;
use skyschedule_tests::server::{PASSWORD, USER};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::common::Result;
use crate::common::process::obey;
use crate::frame::{BEAT, FRAME, Frame, frame};

/// Connections that one process serves here.
const CONNECTIONS: usize = 19_000;

/// Messages that may wait for one connection of the yardstick for memory, as in the real server.
const QUEUE: usize = 64;

/// SkySchedule, as `skyschedule serve` runs it.
pub(crate) async fn real(folder: &str) -> Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let mut config = Config::embedded(folder);
    config.users = vec![User::new(USER, PASSWORD)?];
    config.limits.max_connections = CONNECTIONS;
    config.limits.max_connections_per_address = CONNECTIONS;
    let server = Server::start(config).await?;
    obey(async |words| match words {
        ["address"] => Ok(json!(server.local_addr())),
        ["slots", group, slots] => {
            let settings = Settings {
                numbering: Numbering::Slots(slots.parse()?),
                ..Settings::default()
            };
            server
                .handle()
                .configure(GroupName::new(*group)?, settings)
                .await?;
            Ok(json!(()))
        }
        ["handovers", group] => {
            let text = server.metrics().encode();
            let start = format!("skyschedule_handovers_total{{group=\"{group}\"}}");
            let count = text.lines().find_map(|line| line.strip_prefix(&start));
            Ok(json!(
                count.map_or(Ok(0), |count| count.trim().parse::<u64>())?
            ))
        }
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await?;
    server.shutdown().await?;
    Ok(())
}

/// A bare loop that keeps all sockets, and makes the exchange of a renumbering with them.
pub(crate) async fn bare(folder: &str) -> Result<()> {
    let log = Log::open(Path::new(folder))?;
    let listener = listen()?;
    let address = listener.local_addr()?;
    let (greeted, mut sockets) = mpsc::unbounded_channel();
    env::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let greeted = greeted.clone();
            env::spawn(async move {
                if let Ok(stream) = greet(stream).await {
                    let _ = greeted.send(stream);
                }
            });
        }
    });
    let mut peers: Vec<TcpStream> = Vec::new();
    obey(async |words| match words {
        ["address"] => Ok(json!(address)),
        ["wait", count] => {
            let count = count.parse()?;
            while peers.len() < count {
                peers.push(sockets.recv().await.ok_or("the listener has ended")?);
            }
            Ok(json!(env::now().as_nanos()))
        }
        ["exchange", count] => {
            let peers = &mut peers[..count.parse()?];
            let began = env::now();
            exchange(&log, peers).await?;
            Ok(json!(began.as_nanos()))
        }
        ["ends"] => {
            for mut peer in peers.drain(..) {
                // The end may also be a reset.
                let _ = peer.read(&mut [0; FRAME]).await;
            }
            Ok(json!(env::now().as_nanos()))
        }
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// Two frames each way.
async fn greet(mut stream: TcpStream) -> Result<TcpStream> {
    stream.set_nodelay(true)?;
    let mut frame: Frame = [0; FRAME];
    for _ in 0..2 {
        stream.read_exact(&mut frame).await?;
        stream.write_all(&frame).await?;
    }
    Ok(stream)
}

/// What a renumbering costs at least: a decision, a frame to each, an answer of each, a decision, a frame to each.
async fn exchange(log: &Log, peers: &mut [TcpStream]) -> Result<()> {
    let mut answer: Frame = [0; FRAME];
    log.append(64)?;
    for half in 0..2 {
        if half == 1 {
            // A decision that names all members.
            log.append(12 * peers.len())?;
        }
        for peer in &mut *peers {
            peer.write_all(&frame(0)).await?;
        }
        for peer in &mut *peers {
            peer.read_exact(&mut answer).await?;
        }
    }
    Ok(())
}

/// Answers every frame, with a task a connection: `raw` bytes, or `Framed` with default buffers and a bounded queue.
pub(crate) async fn echo(framed: bool) -> Result<()> {
    let listener = listen()?;
    let address = listener.local_addr()?;
    env::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if framed {
                env::spawn(echo_frames(stream));
            } else {
                env::spawn(echo_bytes(stream));
            }
        }
    });
    obey(async |_| Ok(json!(address))).await
}

async fn echo_bytes(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut frame: Frame = [0; FRAME];
    loop {
        stream.read_exact(&mut frame).await?;
        stream.write_all(&frame).await?;
    }
}

async fn echo_frames(stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut frames = Framed::new(stream, LengthDelimitedCodec::new());
    let (queue, mut outgoing) = mpsc::channel::<Bytes>(QUEUE);
    loop {
        tokio::select! {
            frame = frames.next() => match frame {
                Some(frame) => queue.try_send(frame?.freeze())?,
                None => return Ok(()),
            },
            Some(frame) = outgoing.recv() => frames.send(frame).await?,
        }
    }
}

fn listen() -> Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    Ok(socket.listen(4_096)?)
}

/// The same store as the real server's, with nothing around it.
struct Log(Database);

impl Log {
    const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");

    fn open(folder: &Path) -> Result<Self> {
        Ok(Self(Database::create(folder.join("log"))?))
    }

    fn append(&self, bytes: usize) -> Result<()> {
        let transaction = self.0.begin_write()?;
        {
            let mut table = transaction.open_table(Self::TABLE)?;
            table.insert(env::now().as_nanos(), vec![BEAT; bytes].as_slice())?;
        }
        transaction.commit()?;
        Ok(())
    }
}
