//! How long the others wait when a member is gone: `cargo bench -p skyschedule-tests --bench renumber`.
//!
//! Five idle clients, one of them in a process of its own. That one is killed (SIGKILL) or stopped
//! (SIGSTOP), and the clock runs from the signal until the other four have a numbering of four that covers
//! every row. Beside it, in turn, a bare tokio loop of the same shape: it sees the end of the killed
//! process's connection, sends four frames, waits for four acknowledgements, and sends four frames more.
//! That is the least that a release and a grant can cost.
//!
//! `-- --rounds N` sets the number of kills (30), `-- --json` prints one JSON object instead of the table.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures the real world"
)]

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_client::Client;
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Millis;
use skyschedule_server::state::Settings;
use skyschedule_server::{Server, config::Config};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const OTHERS: usize = 4;
const FRAME: [u8; 32] = [7; 32];

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("member") => return member(&arguments[2], &arguments[3]).await,
        Some("raw") => return raw_member(&arguments[2]).await,
        _ => {}
    }
    let rounds = arguments.iter().position(|argument| argument == "--rounds");
    let rounds: usize = rounds
        .and_then(|at| arguments.get(at + 1)?.parse().ok())
        .unwrap_or(30);
    let json = arguments.iter().any(|argument| argument == "--json");

    let folder = tempfile::tempdir()?;
    let server = Server::start(Config::embedded(folder.path())).await?;
    let mut killed = Vec::new();
    let mut bare = Vec::new();
    let mut others = Others::join(&server, "killed").await?;
    for _ in 0..rounds {
        killed.push(others.lose(Signal::KILL).await?);
        bare.push(bare_loop().await?);
    }
    let short = Settings {
        lease: Some(Millis(2_000)),
        drain_timeout: Millis(1_000),
        ..Settings::default()
    };
    server
        .handle()
        .configure(GroupName::new("stopped")?, short)
        .await?;
    let mut others = Others::join(&server, "stopped").await?;
    let mut stopped = Vec::new();
    for _ in 0..3 {
        stopped.push(others.lose(Signal::STOP).await?);
    }
    report(json, &mut killed, &mut bare, &mut stopped);
    server.shutdown().await?;
    Ok(())
}

/// Four clients of one group in this process.
struct Others {
    address: SocketAddr,
    group: &'static str,
    clients: Vec<Client>,
    round: usize,
}

impl Others {
    async fn join(server: &Server, group: &'static str) -> Result<Self> {
        let address = server.local_addr();
        let mut clients = Vec::new();
        for number in 0..OTHERS {
            clients.push(connect(address, group, &format!("other-{number}")).await?);
        }
        Ok(Self {
            address,
            group,
            clients,
            round: 0,
        })
    }

    /// A fifth joins in its own process and is lost; answers how long the others took to number four.
    async fn lose(&mut self, signal: Signal) -> Result<Duration> {
        self.round += 1;
        let name = format!("lost-{}", self.round);
        let mut child = start(
            "member",
            &[&self.address.to_string(), &format!("{}/{name}", self.group)],
        )?;
        self.wait_for(5, OTHERS).await?;
        // The last ones settle.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let began = Instant::now();
        kill_process(pid(&child)?, signal)?;
        self.wait_for(4, OTHERS).await?;
        let took = began.elapsed();
        child.kill()?;
        child.wait()?;
        Ok(took)
    }

    /// Waits until the clients hold different numbers of `total`.
    async fn wait_for(&self, total: u32, distinct: usize) -> Result<()> {
        let limit = Instant::now() + Duration::from_secs(30);
        for client in &self.clients {
            let mut shares = client.shares();
            let has = |node: Option<(u32, u32)>| node.is_some_and(|(of, _)| of == total);
            let waited =
                tokio::time::timeout_at(limit.into(), shares.wait_for(|status| has(status.node)))
                    .await;
            waited.map_err(|_| format!("no numbering of {total} within 30 s"))??;
        }
        let mut numbers: Vec<_> = self.clients.iter().filter_map(Client::node).collect();
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.len() == distinct {
            Ok(())
        } else {
            Err(format!("the numbers are not distinct: {numbers:?}").into())
        }
    }
}

async fn connect(address: SocketAddr, group: &str, name: &str) -> Result<Client> {
    Ok(Client::builder()
        .servers([address.to_string()])
        .group(group)
        .client_id(name)
        .connect()
        .await?)
}

fn start(role: &str, arguments: &[&str]) -> Result<Child> {
    let program = std::env::current_exe()?;
    Ok(Command::new(program)
        .arg(role)
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()?)
}

fn pid(child: &Child) -> Result<Pid> {
    Ok(Pid::from_raw(i32::try_from(child.id())?).ok_or("a process without an id")?)
}

/// The child: a member until it is killed.
async fn member(address: &str, name: &str) -> Result<()> {
    let (group, name) = name.split_once('/').ok_or("group/name expected")?;
    let _client = connect(address.parse()?, group, name).await?;
    tokio::time::sleep(Duration::from_secs(120)).await;
    Ok(())
}

/// The child of the bare loop: a connection until it is killed.
async fn raw_member(address: &str) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(&[1]).await?;
    tokio::time::sleep(Duration::from_secs(120)).await;
    Ok(())
}

/// From the kill of one of five until the other four have had two frames, the first acknowledged.
async fn bare_loop() -> Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let mut child = start("raw", &[&address.to_string()])?;
    let (mut lost, _) = listener.accept().await?;
    lost.read_exact(&mut [0]).await?;
    let mut peers = Vec::new();
    let mut ends = Vec::new();
    for _ in 0..OTHERS {
        ends.push(tokio::spawn(echo_first(TcpStream::connect(address).await?)));
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        peers.push(stream);
    }
    let began = Instant::now();
    kill_process(pid(&child)?, Signal::KILL)?;
    // A killed process may also show a reset.
    let _ = lost.read(&mut [0]).await;
    for peer in &mut peers {
        peer.write_all(&FRAME).await?;
    }
    for peer in &mut peers {
        peer.read_exact(&mut [0; FRAME.len()]).await?;
    }
    for peer in &mut peers {
        peer.write_all(&FRAME).await?;
    }
    for end in ends {
        end.await??;
    }
    let took = began.elapsed();
    child.wait()?;
    Ok(took)
}

async fn echo_first(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut frame = [0; FRAME.len()];
    stream.read_exact(&mut frame).await?;
    stream.write_all(&frame).await?;
    stream.read_exact(&mut frame).await?;
    Ok(())
}

fn report(json: bool, killed: &mut [Duration], bare: &mut [Duration], stopped: &mut [Duration]) {
    let ms = |times: &mut [Duration], part: f64| {
        times.sort_unstable();
        let last = times.len().saturating_sub(1);
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss
        )]
        let at = (last as f64 * part).round() as usize;
        times.get(at).map_or(0.0, Duration::as_secs_f64) * 1_000.0
    };
    let mut rows = Vec::new();
    for (name, bar, times) in [
        ("SIGKILL of one of 5, until 4 are numbered", "100", killed),
        ("  bare tokio loop, the same exchange", "", bare),
        ("SIGSTOP of one of 5, lease 2 s", "3000", stopped),
    ] {
        rows.push((
            name,
            bar,
            ms(times, 0.5),
            ms(times, 0.9),
            ms(times, 1.0),
            times.len(),
        ));
    }
    let mut out = String::new();
    if json {
        let values: Vec<_> = rows
            .iter()
            .map(|(name, _, median, p90, max, rounds)| {
                serde_json::json!({"what": name.trim(), "median_ms": median, "p90_ms": p90, "max_ms": max, "rounds": rounds})
            })
            .collect();
        out.push_str(&serde_json::json!({ "renumber": values }).to_string());
    } else {
        out.push_str(&format!(
            "{:<44}{:>9}{:>9}{:>9}{:>8}{:>8}\n",
            "ms", "median", "p90", "max", "bar", "rounds"
        ));
        for (name, bar, median, p90, max, rounds) in &rows {
            out.push_str(&format!(
                "{name:<44}{median:>9.1}{p90:>9.1}{max:>9.1}{bar:>8}{rounds:>8}\n"
            ));
        }
        out.push_str(&format!(
            "ratio to the bare loop (medians): {:.1}",
            rows[0].2 / rows[1].2
        ));
    }
    #[allow(clippy::print_stdout, reason = "a benchmark prints its result")]
    {
        println!("{out}");
    }
}
