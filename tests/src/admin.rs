//! The server's admin interface, as scripts use it.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use skyschedule_common::env;
use skyschedule_common::env::net::Stream;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;

use crate::member::PATIENCE;
use crate::process::each_line;

/// Where to ask.
#[derive(Debug, Clone, Copy)]
pub struct Admin(SocketAddr);

impl Admin {
    /// The interface at this address.
    pub fn new(address: SocketAddr) -> Self {
        Self(address)
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.0
    }

    /// Whether anybody answers.
    pub async fn answers(&self) -> bool {
        self.call("GET", "/healthz", None).await.is_ok()
    }

    /// Whether the server can number clients.
    pub async fn is_ready(&self) -> bool {
        self.call("GET", "/readyz", None)
            .await
            .is_ok_and(|(status, _)| status == 200)
    }

    /// A group as the server shows it; `None` while it does not exist.
    pub async fn group(&self, name: &str) -> Option<Value> {
        let (status, body) = self
            .answer("GET", &format!("/api/v1/groups/{name}"), None)
            .await;
        match status {
            200 => Some(serde_json::from_str(&body).expect("a group is JSON")),
            404 => None,
            _ => panic!("{status} for group {name}: {body}"),
        }
    }

    /// The answer to any read: its status and its body.
    pub async fn get(&self, path: &str) -> (u16, String) {
        self.answer("GET", path, None).await
    }

    /// The members of a group, by their client ids.
    pub async fn members(&self, group: &str) -> Vec<String> {
        let group = self.group(group).await.unwrap_or_default();
        let members = group["members"].as_array().cloned().unwrap_or_default();
        members
            .iter()
            .map(|member| {
                member["client_id"]
                    .as_str()
                    .expect("a client id is text")
                    .to_owned()
            })
            .collect()
    }

    /// Gives a group these settings, which must be possible; asks again while another server is about to lead.
    pub async fn configure(&self, group: &str, settings: &Value) {
        let path = format!("/api/v1/groups/{group}");
        let deadline = env::now() + PATIENCE;
        loop {
            let (status, body) = self.answer("PUT", &path, Some(settings.to_string())).await;
            if status == 200 {
                return;
            }
            let later = status == 503 && env::now() < deadline;
            assert!(later, "settings {settings} are refused: {status} {body}");
            env::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Asks that a group have these settings: the status and the answer.
    pub async fn put(&self, group: &str, settings: &Value) -> (u16, String) {
        let path = format!("/api/v1/groups/{group}");
        self.answer("PUT", &path, Some(settings.to_string())).await
    }

    /// Asks that a group have these settings; whether it has.
    pub async fn try_configure(&self, group: &str, settings: &Value) -> bool {
        self.put(group, settings).await.0 == 200
    }

    /// A member of a group as the server shows it; `None` while there is none with this client id.
    pub async fn member(&self, group: &str, client: &str) -> Option<Value> {
        let group = self.group(group).await?;
        let mut members = group["members"].as_array()?.iter();
        members
            .find(|member| member["client_id"] == client)
            .cloned()
    }

    /// Asks that a member's share move away; the status and the answer.
    pub async fn drain(&self, group: &str, client: &str) -> (u16, Value) {
        let path = format!("/api/v1/groups/{group}/members/{client}/drain");
        let (status, body) = self.answer("POST", &path, None).await;
        (status, serde_json::from_str(&body).expect("JSON"))
    }

    /// Leases of two seconds, the shortest there are.
    pub async fn short_leases(&self, group: &str) {
        self.configure(
            group,
            &serde_json::json!({ "lease_ms": 2_000, "drain_timeout_ms": 1_000 }),
        )
        .await;
    }

    /// The value of a metric without labels, or the sum over its labels; 0 if there is none yet.
    pub async fn metric(&self, name: &str) -> f64 {
        let (status, body) = self.answer("GET", "/metrics", None).await;
        assert_eq!(status, 200, "{body}");
        body.lines()
            .filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
            })
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }

    /// What happens from now on.
    pub async fn events(&self) -> Events {
        let (address, (sender, lines)) = (self.0, mpsc::channel(1_024));
        let mut stream = Stream::connect(address).await.expect("it answers");
        let request = format!("GET /api/v1/events HTTP/1.1\r\nhost: {address}\r\n\r\n");
        let sent = stream.write_all(request.as_bytes()).await;
        sent.expect("it takes a request");
        env::spawn(each_line(stream, move |line| {
            // The test may have seen enough.
            let _ = sender.try_send(line);
        }));
        let mut events = Events(lines);
        while !events.line().await.is_empty() {}
        events
    }

    async fn answer(
        &self,
        method: &'static str,
        path: &str,
        body: Option<String>,
    ) -> (u16, String) {
        self.call(method, path, body)
            .await
            .unwrap_or_else(|error| panic!("no answer to {method} {path}: {error}"))
    }

    async fn call(
        &self,
        method: &'static str,
        path: &str,
        body: Option<String>,
    ) -> Result<(u16, String), ureq::Error> {
        let url = format!("http://{}{path}", self.0);
        let ask = move || {
            let agent: ureq::Agent = ureq::Agent::config_builder()
                .timeout_global(Some(Duration::from_secs(10)))
                .http_status_as_error(false)
                .proxy(None)
                .build()
                .into();
            let mut response = match body {
                Some(body) => agent
                    .put(&url)
                    .content_type("application/json")
                    .send(body)?,
                None if method == "GET" => agent.get(&url).call()?,
                None => agent
                    .post(&url)
                    .content_type("application/json")
                    .send_empty()?,
            };
            Ok((
                response.status().as_u16(),
                response.body_mut().read_to_string()?,
            ))
        };
        env::blocking(ask).await.expect("asking does not panic")
    }
}

/// A stream of server-sent events.
#[derive(Debug)]
pub struct Events(mpsc::Receiver<String>);

impl Events {
    /// The data of the next event of this name.
    pub async fn until(&mut self, name: &str) -> Value {
        let event = format!("event: {name}");
        while self.line().await != event {}
        let line = self.line().await;
        let data = line.strip_prefix("data: ").expect("data after the name");
        serde_json::from_str(data).expect("data is JSON")
    }

    async fn line(&mut self) -> String {
        let line = env::timeout(PATIENCE, self.0.recv()).await;
        line.expect("an event in time").expect("more events")
    }
}
