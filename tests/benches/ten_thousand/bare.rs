//! The yardsticks: bare tokio, and nothing else.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use redb::{Database, TableDefinition};
use serde_json::json;
use skyschedule_common::env;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::common::Result;
use crate::common::members::Shared;
use crate::common::process::obey;

/// Messages that may wait for one connection of the yardstick for memory, as in the real server.
const QUEUE: usize = 64;

/// Bytes of a frame.
const FRAME: usize = LENGTH + PAYLOAD as usize;

/// A frame.
type Frame = [u8; FRAME];

/// Kind of a frame that its receiver does not answer: it is an answer, or a heartbeat's echo.
const BEAT: u8 = 1;

const LENGTH: usize = 4;
const PAYLOAD: u8 = 28;

/// A frame of this kind.
fn frame(kind: u8) -> Frame {
    let mut frame = [0; FRAME];
    frame[LENGTH - 1] = PAYLOAD;
    frame[LENGTH] = kind;
    frame
}

/// Its kind.
fn kind(frame: &Frame) -> u8 {
    frame[LENGTH]
}

/// A bare loop that keeps all sockets, and makes the exchange of a renumbering with them.
pub(crate) async fn serve(folder: &str) -> Result<()> {
    let log = Log::open(Path::new(folder))?;
    let listener = listen()?;
    let address = listener.local_addr()?;
    let (greeted, mut sockets) = mpsc::unbounded_channel();
    env::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let greeted = greeted.clone();
            env::spawn(async move {
                if let Ok(stream) = be_greeted(stream).await {
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
async fn be_greeted(mut stream: TcpStream) -> Result<TcpStream> {
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

/// Bare sockets that answer each frame, and send heartbeats when asked to.
pub(crate) async fn members(server: &str) -> Result<()> {
    let server: SocketAddr = server.parse()?;
    let tally = Shared::default();
    let (beat, beats) = watch::channel(None);
    obey(async |words| match words {
        ["connect", count] => {
            let count: usize = count.parse()?;
            let connecting: Vec<_> = (0..count).map(|_| env::spawn(greet(server))).collect();
            let mut streams = Vec::new();
            for stream in connecting {
                streams.push(stream.await??);
            }
            let at = env::now().as_nanos();
            for stream in streams {
                env::spawn(answer(stream, tally.clone(), beats.clone()));
            }
            Ok(json!(at))
        }
        ["beat", millis] => {
            beat.send_replace(Some(Duration::from_millis(millis.parse()?)));
            Ok(json!(()))
        }
        ["look"] => Ok(json!(tally.look())),
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// Connects; two frames each way.
async fn greet(server: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let mut answer: Frame = [0; FRAME];
    for _ in 0..2 {
        stream.write_all(&frame(BEAT)).await?;
        stream.read_exact(&mut answer).await?;
    }
    Ok(stream)
}

async fn answer(
    mut stream: TcpStream,
    tally: Shared,
    mut beats: watch::Receiver<Option<Duration>>,
) -> Result<()> {
    let mut incoming: Frame = [0; FRAME];
    let mut period = None;
    loop {
        let beat = async {
            match period {
                Some(period) => env::sleep(period).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            read = stream.read_exact(&mut incoming) => {
                read?;
                if kind(&incoming) != BEAT {
                    tally.change(|tally| tally.last = env::now().as_nanos());
                    stream.write_all(&frame(BEAT)).await?;
                }
            }
            () = beat => stream.write_all(&frame(BEAT)).await?,
            changed = beats.changed() => {
                changed?;
                period = *beats.borrow_and_update();
            }
        }
    }
}
