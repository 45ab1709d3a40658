//! A client for tests: prints a JSON line for each change, and takes commands from stdin, one a line.
//!
//! | command | what it does |
//! |---|---|
//! | `begin KEY` | begins a row and holds it |
//! | `end KEY` | gives the row back |
//! | `block MS` | blocks the user's runtime: nothing of the user runs for so long |
//! | `inspect` | shows mode and lease |
//! | `pull` | asks the server for the present share |
//! | `weight N` | changes the client's weight |
//! | `drain N` | lets the share move away (1), or takes that back (0) |
//! | `close` | closes the client in good order, and ends; so does SIGTERM |
//!
//! With `--keys N` it works on the rows 0 to N-1 that are its own, over and over. It ends at once when stdin
//! does, so that it does not outlive its test.

#[cfg(not(sim))]
mod client {
    use std::collections::BTreeMap;
    use std::error::Error;
    use std::io::{BufRead as _, Write as _};
    use std::process::ExitCode;
    use std::time::Duration;

    use clap::Parser;
    use skyschedule_client::{Client, Consistency, Row, ShareUnion, Status};
    use skyschedule_common::env;
    use skyschedule_tests::member::{Event, Rows};
    use tokio::signal::unix::{SignalKind, signal};
    use tokio::sync::mpsc;

    #[derive(Debug, Clone, Copy, clap::ValueEnum)]
    enum Promise {
        Available,
        Exclusive,
    }

    #[derive(Debug, Parser)]
    struct Options {
        #[arg(long, value_delimiter = ',')]
        servers: Vec<String>,
        #[arg(long)]
        group: String,
        #[arg(long)]
        client_id: String,
        #[arg(long)]
        user: String,
        #[arg(long)]
        password: String,
        #[arg(long)]
        consistency: Option<Promise>,
        #[arg(long, default_value_t = 1)]
        weight: u32,
        /// How long to try to become a member.
        #[arg(long, default_value_t = 30_000)]
        connect_timeout_ms: u64,
        /// Work on the rows 0 to KEYS-1.
        #[arg(long, default_value_t = 0)]
        keys: i64,
        /// How long each row takes.
        #[arg(long, default_value_t = 1)]
        work_ms: u64,
    }

    type Failure = Box<dyn Error + Send + Sync>;

    fn at() -> u64 {
        env::now().as_nanos()
    }

    fn say(event: &Event) -> Result<(), Failure> {
        let line = serde_json::to_string(event)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()?;
        Ok(())
    }

    fn rows(status: &Status) -> Rows {
        let shares = status.rows.shares().iter();
        Rows {
            at: at(),
            epoch: status.epoch.map(|epoch| epoch.to_string()),
            shares: shares
                .map(|share| (share.total(), share.numbers().ranges().to_vec()))
                .collect(),
            node: status.node,
            settled: status.settled,
            mode: status.mode.to_string(),
        }
    }

    /// The lines of stdin. A thread of its own: a runtime would wait for it at its end.
    fn commands() -> mpsc::Receiver<String> {
        let (sender, receiver) = mpsc::channel(16);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        });
        receiver
    }

    #[tokio::main(flavor = "current_thread")]
    pub(crate) async fn run() -> Result<ExitCode, Failure> {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_writer(std::io::stderr)
            .init();
        let options = Options::parse();
        let mut terminated = signal(SignalKind::terminate())?;
        let mut builder = Client::builder()
            .servers(options.servers)
            .group(options.group)
            .client_id(options.client_id)
            .credentials(options.user, options.password)
            .weight(options.weight)
            .connect_timeout(Duration::from_millis(options.connect_timeout_ms));
        if let Some(promise) = options.consistency {
            builder = builder.consistency(match promise {
                Promise::Available => Consistency::Available,
                Promise::Exclusive => Consistency::Exclusive,
            });
        }
        let client = match builder.connect().await {
            Ok(client) => client,
            Err(error) => {
                say(&Event::Failed {
                    at: at(),
                    error: error.to_string(),
                })?;
                return Ok(ExitCode::FAILURE);
            }
        };
        if options.keys > 0 {
            let (client, work) = (client.clone(), Duration::from_millis(options.work_ms));
            env::spawn(async move {
                // Ends when the client closes, or when nobody reads any more.
                let _ = labour(&client, options.keys, work).await;
            });
        }
        let (mut shares, mut state, mut commands) = (client.shares(), client.state(), commands());
        shares.mark_changed();
        state.mark_changed();
        let mut held = BTreeMap::new();
        let closing = std::pin::pin!(async {
            terminated.recv().await;
        });
        let mut closing = Some(closing);
        let (close, mut closed) = mpsc::channel(1);
        loop {
            tokio::select! {
                biased;
                changed = shares.changed() => {
                    changed?;
                    say(&Event::Share(rows(&shares.borrow_and_update())))?;
                }
                changed = state.changed() => {
                    changed?;
                    let state = state.borrow_and_update();
                    say(&Event::State {
                        membership: state.membership.map(|membership| membership.to_string()),
                        links: state.servers.iter().map(|server| format!("{:?}", server.link)).collect(),
                        refusal: state.refusal.clone(),
                    })?;
                }
                heard = closed.recv() => {
                    let heard = heard.is_some_and(|heard| heard);
                    say(&Event::Closed { at: at(), heard })?;
                    return Ok(ExitCode::SUCCESS);
                }
                () = async {
                    match &mut closing {
                        Some(closing) => closing.await,
                        None => std::future::pending().await,
                    }
                } => {
                    closing = None;
                    begin_to_close(&client, &close);
                }
                command = commands.recv() => {
                    let Some(command) = command else { return Ok(ExitCode::FAILURE) };
                    match command.as_str() {
                        "close" => begin_to_close(&client, &close),
                        "pull" => pull(&client),
                        other => obey(&client, &mut held, other)?,
                    }
                }
            }
        }
    }

    fn begin_to_close(client: &Client, closed: &mpsc::Sender<bool>) {
        let (client, closed) = (client.clone(), closed.clone());
        env::spawn(async move {
            let heard = client.close().await.is_ok();
            // It was asked to close twice.
            let _ = closed.try_send(heard);
        });
    }

    fn pull(client: &Client) {
        let client = client.clone();
        env::spawn(async move {
            let (epoch, share) = client.pull().await?;
            let (epoch, share) = (epoch.to_string(), ShareUnion::from(share));
            let shares = share.shares().iter();
            let numbers = shares
                .map(|share| format!("{}/{}", share.numbers(), share.total()))
                .collect();
            say(&Event::Pulled { epoch, numbers })
        });
    }

    fn obey(client: &Client, held: &mut BTreeMap<i64, Row>, command: &str) -> Result<(), Failure> {
        let (verb, argument) = command.split_once(' ').unwrap_or((command, "0"));
        let number: i64 = argument.parse()?;
        match verb {
            "begin" => {
                let row = begin(client, number);
                let epoch = row.as_ref().map(|row| row.epoch().to_string());
                say(&begun(client, number, epoch))?;
                held.extend(row.map(|row| (number, row)));
            }
            "end" => {
                let revoked = held.get(&number).is_some_and(Row::is_revoked);
                let at = at();
                held.remove(&number);
                say(&Event::Ended {
                    at,
                    key: number,
                    revoked,
                })?;
            }
            "block" => {
                std::thread::sleep(Duration::from_millis(number.unsigned_abs()));
                say(&Event::Unblocked { at: at() })?;
            }
            "inspect" => {
                let inside = client.inspect();
                say(&Event::Inspection {
                    at: at(),
                    mode: inside.mode.to_string(),
                    lease_left_ms: inside.lease_left.as_millis().try_into()?,
                })?;
            }
            "weight" => client.update_weight(number.try_into()?)?,
            "drain" => client.drain(number != 0),
            _ => return Err(format!("unknown command {command:?}").into()),
        }
        Ok(())
    }

    fn begun(client: &Client, key: i64, epoch: Option<String>) -> Event {
        let (at, left) = (at(), client.inspect().lease_left.as_nanos());
        Event::Begun {
            at,
            key,
            epoch,
            lease_left: u64::try_from(left).unwrap_or(u64::MAX),
        }
    }

    /// Begins a row with what the client may work on at this instant.
    fn begin(client: &Client, key: i64) -> Option<Row> {
        use std::task::{Context, Poll, Waker};
        let mut acquiring = std::pin::pin!(client.acquire());
        match acquiring
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(Ok(work)) => work.begin(key),
            Poll::Ready(Err(_)) | Poll::Pending => None,
        }
    }

    /// Works on its own rows, over and over.
    async fn labour(client: &Client, keys: i64, takes: Duration) -> Result<(), Failure> {
        loop {
            let work = client.acquire().await?;
            for key in 0..keys {
                let Some(row) = work.begin(key) else { continue };
                let epoch = Some(row.epoch().to_string());
                say(&begun(client, key, epoch))?;
                let revoked = tokio::select! {
                    biased;
                    () = row.revoked() => true,
                    () = env::sleep(takes) => false,
                };
                let at = at();
                drop(row);
                say(&Event::Ended { at, key, revoked })?;
            }
            env::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[cfg(not(sim))]
fn main() -> Result<std::process::ExitCode, Box<dyn std::error::Error + Send + Sync>> {
    client::run()
}

/// The simulation has hosts instead of processes.
#[cfg(sim)]
fn main() {}
