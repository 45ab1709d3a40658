//! Decisions a second of three servers: settings of a group that a quorum has on disk, beside keys of etcd.
//!
//! Both are asked by one process that has a connection to the leader for each decision in flight:
//! SkySchedule by HTTP and JSON, etcd by its own library. Each connection changes a thing of its own.

use std::net::SocketAddr;
use std::time::Duration;

use etcd_client::{Client, KvClient};
use serde::{Deserialize, Serialize};
use serde_json::json;
use skyschedule_common::env;
use skyschedule_common::env::net::Stream;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

use crate::Options;
use crate::common::Result;
use crate::common::process::{Worker, obey};
use crate::common::report::{Bar, Report, Row, Samples};
use crate::replicas::Replicas;
use crate::{etcd, servers::PATIENCE};

/// As many as etcd, in as little time.
const RATE_BAR: Bar = Bar::AtLeast(1.0);
const TIME_BAR: Bar = Bar::AtMost(1.0);

/// The yardstick.
const NAME: &str = "3 etcd, put";

/// Decisions in flight; the admin interface takes 96 connections from one address.
const IN_FLIGHT: [usize; 2] = [1, 64];

/// Runs of each kind, in turn with those of the yardstick.
const ROUNDS: usize = 3;

/// What a run showed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Answered {
    /// How long all took together.
    took: Duration,
    each: Vec<Duration>,
}

/// A connection over which one decision after the other is asked for.
pub(crate) trait Decider: Sized + Send + 'static {
    /// The number tells connections apart.
    fn connect(server: &str, number: usize) -> impl Future<Output = Result<Self>> + Send;

    /// Has something decided, and waits until it is.
    fn decide(&mut self) -> impl Future<Output = Result<()>> + Send;
}

/// Settings of a group of SkySchedule.
pub(crate) struct Settings {
    stream: BufReader<Stream>,
    group: String,
    settle: u32,
}

impl Decider for Settings {
    async fn connect(server: &str, number: usize) -> Result<Self> {
        let address: SocketAddr = server.parse()?;
        Ok(Self {
            stream: BufReader::new(Stream::connect(address).await?),
            group: format!("decided-{number}"),
            settle: 20,
        })
    }

    async fn decide(&mut self) -> Result<()> {
        // Another value each time.
        self.settle = 41 - self.settle;
        let (group, body) = (&self.group, json!({ "settle_ms": self.settle }).to_string());
        let request = format!(
            "PUT /api/v1/groups/{group} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let start = head.len();
            if self.stream.read_line(&mut head).await? == 0 {
                return Err("the connection ended".into());
            }
            let line = head[start..].trim().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            if line.is_empty() {
                break;
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer).await?;
        if !head.starts_with("HTTP/1.1 200") {
            let answer = String::from_utf8_lossy(&answer);
            return Err(format!("{head}{answer}").into());
        }
        Ok(())
    }
}

/// A key of etcd.
pub(crate) struct Put {
    keys: KvClient,
    number: usize,
    value: u64,
}

impl Decider for Put {
    async fn connect(server: &str, number: usize) -> Result<Self> {
        let keys = Client::connect([server], None).await?.kv_client();
        Ok(Self {
            keys,
            number,
            value: 0,
        })
    }

    async fn decide(&mut self) -> Result<()> {
        self.value += 1;
        let (key, value) = (
            format!("/decided/{}", self.number),
            format!("{:08}", self.value),
        );
        self.keys.put(key, value, None).await?;
        Ok(())
    }
}

/// The process that asks.
pub(crate) async fn run<D: Decider>(server: &str) -> Result<()> {
    obey(async |words| match words {
        ["run", connections, millis] => {
            let mut deciders = Vec::new();
            for number in 0..connections.parse()? {
                let mut decider = D::connect(server, number).await?;
                decider.decide().await?;
                deciders.push(decider);
            }
            let began = env::now();
            let end = began + Duration::from_millis(millis.parse()?);
            let asking: Vec<_> = deciders
                .into_iter()
                .map(|mut decider| {
                    env::spawn(async move {
                        let mut each = Vec::new();
                        while env::now() < end {
                            let asked = env::now();
                            decider.decide().await?;
                            each.push(asked.elapsed());
                        }
                        Result::Ok(each)
                    })
                })
                .collect();
            let mut answered = Answered::default();
            for asking in asking {
                answered.each.extend(asking.await??);
            }
            answered.took = began.elapsed();
            Ok(json!(answered))
        }
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// Times of each, and how many a second.
#[derive(Default)]
struct Outcome {
    each: Samples,
    rates: Samples,
}

impl Outcome {
    fn add(&mut self, answered: &Answered) {
        for took in &answered.each {
            self.each.push(*took);
        }
        let rate = answered.each.len() as f64 / answered.took.as_secs_f64();
        self.rates.extend(Samples::one(rate));
    }
}

/// Measures both in turn.
pub(crate) async fn all(options: &Options, report: &mut Report) -> Result<()> {
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let replicas = Replicas::start(folders[0].path()).await?;
    let stores = etcd::Servers::start::<3>(folders[1].path()).await?;
    for connections in IN_FLIGHT {
        let [mut ours, mut theirs] = [const {
            Outcome {
                each: Samples::NONE,
                rates: Samples::NONE,
            }
        }; 2];
        for _ in 0..ROUNDS {
            // Whoever leads now.
            let leader = replicas.admin_address(replicas.leader().await?).to_string();
            ours.add(&ask("settings", &leader, connections, options.seconds).await?);
            let leader = stores.address(stores.leader().await?);
            theirs.add(&ask("puts", leader, connections, options.seconds).await?);
        }
        let what = |what: &str| format!("3 servers, {connections} in flight: {what}");
        let times = (NAME, theirs.each);
        report.add(Row::beside(
            what("a commit"),
            "ms",
            ours.each,
            times,
            TIME_BAR,
        ));
        let rates = (NAME, theirs.rates);
        report.add(Row::beside(
            what("commits"),
            "1/s",
            ours.rates,
            rates,
            RATE_BAR,
        ));
    }
    Ok(())
}

async fn ask(role: &str, server: &str, connections: usize, seconds: u64) -> Result<Answered> {
    let mut asking = Worker::start(role, &[server])?;
    let command = format!("run {connections} {}", seconds * 1_000);
    let limit = PATIENCE + Duration::from_secs(seconds);
    let answered = env::timeout(limit, asking.ask(&command)).await??;
    asking.end().await?;
    Ok(answered)
}
