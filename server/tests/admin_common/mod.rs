//! A real server with its admin interface, plain HTTP to ask it, and members by hand.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, of which each test uses a part"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::Value;
use skyschedule_common::env::net::Stream;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::codec::{FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{ClientHello, ClientMessage, Login, ServerMessage};
use skyschedule_common::protocol::{MAGIC, MIN_VERSION, VERSION};
use skyschedule_server::Server;
use skyschedule_server::config::{AdminConfig, Config};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::codec::{Decoder as _, Framed};

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A server in this process.
pub struct Running {
    runtime: Runtime,
    server: Option<Server>,
    pub clients: SocketAddr,
    pub admin: SocketAddr,
    _dir: TempDir,
}

impl Running {
    /// A server that listens for admin calls at this address of the machine, and is ready.
    pub fn start(listen: [u8; 4], token: Option<&str>) -> Self {
        let dir = TempDir::new().unwrap();
        let config = Config {
            admin: Some(AdminConfig {
                listen: (listen, 0).into(),
                token: token.map(Into::into),
            }),
            ..Config::embedded(dir.path())
        };
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(Server::start(config)).unwrap();
        let port = server.admin_addr().unwrap().port();
        let running = Self {
            clients: server.local_addr(),
            admin: ([127, 0, 0, 1], port).into(),
            server: Some(server),
            runtime,
            _dir: dir,
        };
        running.wait("the server is ready", || {
            running.get("/readyz").status == 200
        });
        running
    }

    /// A server for this machine only, without a token.
    pub fn local() -> Self {
        Self::start([127, 0, 0, 1], None)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.call("GET", path, &[], "")
    }

    pub fn put(&self, path: &str, body: &Value) -> Answer {
        self.call(
            "PUT",
            path,
            &["content-type: application/json"],
            &body.to_string(),
        )
    }

    /// A call with more head lines.
    pub fn call(&self, method: &str, path: &str, head: &[&str], body: &str) -> Answer {
        let mut stream = self.connect();
        self.write_request(&mut stream, method, path, head, body);
        Answer::read(stream)
    }

    fn write_request(
        &self,
        stream: &mut TcpStream,
        method: &str,
        path: &str,
        head: &[&str],
        body: &str,
    ) {
        let more: String = head.iter().map(|line| format!("{line}\r\n")).collect();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n{more}\r\n{body}",
            self.admin,
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
    }

    /// A connection to the admin interface.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.admin).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Events from now on.
    pub fn events(&self) -> Events {
        let mut stream = self.connect();
        self.write_request(&mut stream, "GET", "/api/v1/events", &[], "");
        let mut lines = BufReader::new(stream);
        let mut status = String::new();
        lines.read_line(&mut status).unwrap();
        assert!(status.contains("200"), "{status}");
        let mut events = Events(lines);
        while !events.line().unwrap().is_empty() {}
        events
    }

    /// Waits until something holds.
    pub fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = skyschedule_common::env::now() + PATIENCE;
        while !holds() {
            assert!(skyschedule_common::env::now() < deadline, "in vain: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A new member, which lives until it is dropped or its lease ends.
    pub fn member(&self, group: &str, client: &str) -> Member {
        self.runtime
            .block_on(Member::join(self.clients, group, client))
    }

    /// Stops the server in order.
    pub fn stop(mut self) {
        let server = self.server.take().unwrap();
        self.runtime.block_on(server.shutdown()).unwrap();
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    fn read(mut stream: TcpStream) -> Self {
        let mut text = Vec::new();
        // A reset after the answer is no loss.
        let _ = stream.read_to_end(&mut text);
        let text = String::from_utf8(text).unwrap();
        let (head, body) = text
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("{text:?} is no answer"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            status,
            head: head.to_ascii_lowercase(),
            body: body.into(),
        }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The code of an error, which must have the one shape of errors.
    pub fn error(&self) -> String {
        let body = self.json();
        let error = body["error"]
            .as_object()
            .unwrap_or_else(|| panic!("{self:?}"));
        assert_eq!(body.as_object().unwrap().len(), 1, "{self:?}");
        assert_eq!(error.len(), 2, "{self:?}");
        assert!(!error["message"].as_str().unwrap().is_empty());
        error["code"].as_str().unwrap().to_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// A stream of server-sent events.
pub struct Events(BufReader<TcpStream>);

impl Events {
    /// The next event: its name and its data. None when the server ended the stream.
    pub fn next(&mut self) -> Option<(String, Value)> {
        let mut name = None;
        loop {
            let line = self.line()?;
            if let Some(text) = line.strip_prefix("event: ") {
                name = Some(text.to_owned());
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((name.unwrap(), serde_json::from_str(data).unwrap()));
            }
        }
    }

    /// The next event of this name.
    pub fn until(&mut self, wanted: &str) -> Value {
        loop {
            let (name, data) = self
                .next()
                .unwrap_or_else(|| panic!("no {wanted} before the end"));
            if name == wanted {
                return data;
            }
        }
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line).unwrap();
        (read > 0).then(|| line.trim_end().to_owned())
    }
}

/// A connection from another address of this machine.
pub fn connect_from(from: IpAddr, to: SocketAddr, runtime: &Runtime) -> std::io::Result<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    let stream = runtime.block_on(socket.connect(to))?.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A client that is a member.
pub struct Member {
    frames: Framed<Stream, FrameCodec<ServerMessage, ClientMessage>>,
}

impl Member {
    async fn join(to: SocketAddr, group: &str, client: &str) -> Self {
        let stream = Stream::connect(to).await.unwrap();
        let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let mut codec = FrameCodec::new();
        codec.set_max_frame(MAX_FRAME);
        let mut member = Self {
            frames: codec.framed(stream),
        };
        let hello = ClientHello {
            magic: MAGIC,
            min_version: MIN_VERSION,
            max_version: VERSION,
            features: 0,
            agent: BoundedString::truncated("test"),
        };
        let login = Login {
            group: GroupName::new(group).unwrap(),
            client: ClientId::new(client).unwrap(),
            incarnation: Incarnation(u128::from(ends.0.port())),
            membership: None,
            epoch: Epoch::ZERO,
            consistency: None,
            weight: 1,
            ends: Some(ends),
            ring_key: None,
            handlers: BoundedVec::new(),
        };
        let attach = ClientMessage::Attach {
            membership: None,
            epoch: Epoch::ZERO,
        };
        for message in [
            ClientMessage::Hello(hello),
            ClientMessage::Login(Box::new(login)),
            attach,
        ] {
            member.frames.send(message).await.unwrap();
        }
        let welcome = async {
            loop {
                match member.frames.next().await.unwrap().unwrap() {
                    ServerMessage::Welcome { .. } => return,
                    ServerMessage::Refused(refusal) => panic!("{refusal:?}"),
                    _ => {}
                }
            }
        };
        skyschedule_common::env::timeout(PATIENCE, welcome)
            .await
            .unwrap();
        member
    }
}
