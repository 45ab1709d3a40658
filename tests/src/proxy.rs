//! A bad network: a TCP proxy whose every direction can be slowed, stalled, deafened or ended.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use skyschedule_common::env::{self, JoinHandle};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, watch};

use crate::process::own_address;

/// How long what a test waits for may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// What happens to the bytes of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// They arrive.
    Pass,
    /// They arrive later.
    Delay(Duration),
    /// They wait until the direction flows again; an end of the connection is not seen either. Both
    /// directions stalled are a half-open connection: neither side learns that the other is gone.
    Stall,
    /// They are lost, and the sender does not notice.
    Discard,
    /// The receiver gets a FIN; whatever the sender still sends is lost.
    Fin,
}

/// Whose bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Those of the client.
    ToServer,
    /// Those of the server.
    ToClient,
}

/// A proxy before a server.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    network: Arc<Network>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Network {
    target: SocketAddr,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What new connections begin with: to the server, to the client.
    flows: [Flow; 2],
    admits: bool,
    links: Vec<Link>,
    recorded: Vec<u8>,
    /// The direction to the server stalls before what contains these bytes.
    snare: Option<Vec<u8>>,
}

impl State {
    fn set(&mut self, direction: Direction, flow: Flow) {
        self.flows[direction as usize] = flow;
        for link in &self.links {
            link.set(direction, flow);
        }
    }

    /// Records what a client sends, and stalls before it where that was asked for.
    fn record(&mut self, bytes: &[u8]) {
        let before = self.recorded.len();
        self.recorded.extend_from_slice(bytes);
        let caught = self.snare.take_if(|snare| {
            let from = before.saturating_sub(snare.len() - 1);
            contains(&self.recorded[from..], snare)
        });
        if caught.is_some() {
            self.set(Direction::ToServer, Flow::Stall);
        }
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// One connection through the proxy.
#[derive(Debug, Clone)]
pub struct Link(Arc<Controls>);

#[derive(Debug)]
struct Controls {
    flows: [watch::Sender<Flow>; 2],
    reset: Notify,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// One side reset the connection, or it failed.
#[derive(Debug)]
struct Reset;

impl From<io::Error> for Reset {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl Proxy {
    /// A proxy before the server at `target`, with an address of its own. At first it is a good network.
    #[expect(
        clippy::disallowed_methods,
        reason = "decides itself how its connections end"
    )]
    pub async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((own_address(), 9991))
            .await
            .expect("the address is ours");
        let address = listener.local_addr().expect("it listens");
        let state = State {
            flows: [Flow::Pass; 2],
            admits: true,
            links: Vec::new(),
            recorded: Vec::new(),
            snare: None,
        };
        let network = Arc::new(Network {
            target,
            state: Mutex::new(state),
        });
        let accepting = env::spawn(accept(listener, network.clone()));
        Self {
            address,
            network,
            accepting,
        }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets a direction of all connections, those to come included.
    pub fn set(&self, direction: Direction, flow: Flow) {
        self.network.state.lock().unwrap().set(direction, flow);
    }

    /// Stalls the direction to the server, until it is set again, as soon as a client sends these bytes: they, and what
    /// follows on any connection, do not arrive.
    pub fn stall_at(&self, bytes: &[u8]) {
        assert!(!bytes.is_empty(), "nothing is sent always");
        self.network.state.lock().unwrap().snare = Some(bytes.to_owned());
    }

    /// Waits until the direction to the server is stalled.
    pub async fn stalled(&self) {
        let deadline = env::now() + PATIENCE;
        let flow = || self.network.state.lock().unwrap().flows[Direction::ToServer as usize];
        while flow() != Flow::Stall {
            assert!(env::now() < deadline, "nobody sends what is waited for");
            env::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until a client has sent these bytes.
    pub async fn carried(&self, bytes: &[u8]) {
        let deadline = env::now() + PATIENCE;
        while !contains(&self.recorded(), bytes) {
            assert!(env::now() < deadline, "nobody sends what is waited for");
            env::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Whether new connections come through; otherwise they are reset.
    pub fn admit(&self, admits: bool) {
        self.network.state.lock().unwrap().admits = admits;
    }

    /// The connections that are open, oldest first.
    pub fn links(&self) -> Vec<Link> {
        let mut state = self.network.state.lock().unwrap();
        state.links.retain(Link::is_open);
        state.links.clone()
    }

    /// What clients have sent so far.
    pub fn recorded(&self) -> Vec<u8> {
        self.network.state.lock().unwrap().recorded.clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        for link in self.links() {
            link.reset();
        }
    }
}

impl Link {
    /// Sets a direction of this connection.
    pub fn set(&self, direction: Direction, flow: Flow) {
        self.0.flows[direction as usize].send_replace(flow);
    }

    /// Ends the connection by a reset on both sides.
    pub fn reset(&self) {
        self.0.reset.notify_one();
    }

    /// Whether it has not ended yet.
    pub fn is_open(&self) -> bool {
        self.0
            .task
            .lock()
            .unwrap()
            .as_ref()
            .is_none_or(|task| !task.is_finished())
    }
}

async fn accept(listener: TcpListener, network: Arc<Network>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let mut state = network.state.lock().unwrap();
        if !state.admits {
            client.set_zero_linger().expect("it was just accepted");
            continue;
        }
        let link = Link(Arc::new(Controls {
            flows: state.flows.map(watch::Sender::new),
            reset: Notify::new(),
            task: Mutex::new(None),
        }));
        let task = env::spawn(carry(client, link.clone(), network.clone()));
        *link.0.task.lock().unwrap() = Some(task);
        state.links.push(link);
    }
}

/// One connection from its beginning to its end.
async fn carry(client: TcpStream, link: Link, network: Arc<Network>) {
    let socket = TcpSocket::new_v4().expect("there are descriptors left");
    let Ok(server) = socket.connect(network.target).await else {
        client.set_zero_linger().expect("it is open");
        return;
    };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("it is open");
    }
    let [to_server, to_client] = link.0.flows.each_ref().map(watch::Sender::subscribe);
    let (mut from_client, mut into_client) = client.into_split();
    let (mut from_server, mut into_server) = server.into_split();
    let record = |bytes: &[u8]| network.state.lock().unwrap().record(bytes);
    let both = async {
        tokio::try_join!(
            pump(&mut from_client, &mut into_server, to_server, record),
            pump(&mut from_server, &mut into_client, to_client, |_| ()),
        )
    };
    let in_order = tokio::select! {
        biased;
        () = link.0.reset.notified() => false,
        ended = both => ended.is_ok(),
    };
    if !in_order {
        for half in [&into_client, &into_server] {
            // Fails only where the connection has ended already.
            let _ = half.as_ref().set_zero_linger();
        }
    }
}

/// Carries one direction to its end.
async fn pump(
    from: &mut OwnedReadHalf,
    into: &mut OwnedWriteHalf,
    mut flow: watch::Receiver<Flow>,
    record: impl Fn(&[u8]),
) -> Result<(), Reset> {
    let mut buffer = vec![0; 16 * 1_024];
    let mut ended = false;
    loop {
        let present = *flow.borrow_and_update();
        if present == Flow::Fin && !ended {
            into.shutdown().await?;
            ended = true;
        }
        let read = async {
            if present == Flow::Stall {
                let never: Infallible = std::future::pending().await;
                match never {}
            }
            from.read(&mut buffer).await
        };
        let length = tokio::select! {
            biased;
            changed = flow.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return Err(Reset),
            },
            read = read => read?,
        };
        if length == 0 {
            if !ended {
                into.shutdown().await?;
            }
            return Ok(());
        }
        record(&buffer[..length]);
        while *flow.borrow_and_update() == Flow::Stall {
            flow.changed().await.map_err(|_| Reset)?;
        }
        if let Flow::Delay(delay) = present {
            env::sleep(delay).await;
        }
        if !matches!(present, Flow::Discard | Flow::Fin) {
            into.write_all(&buffer[..length]).await?;
        }
    }
}
