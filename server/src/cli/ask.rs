//! Commands that ask a running server.

use std::io;
use std::thread::sleep;
use std::time::Duration;

use clap::ArgMatches;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use skyschedule_common::env;
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_server::config::{ADMIN, ADMIN_TOKEN, ADMIN_TOKEN_FILE};
use ureq::Agent;
use ureq::http::Request;

use super::unanswered::{self, Asked};
use super::{Failure, print, show, sources};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long is asked again while there is no leader: many elections fit in.
const ELECTED: Duration = Duration::from_secs(6);
/// Pause between two questions.
pub(super) const PAUSE: Duration = Duration::from_millis(500);

/// Largest answer: 10,000 members are some 3 MB.
const MAX_ANSWER: u64 = 256 << 20;

/// Runs the command `name`.
pub(super) fn ask(name: &str, matches: &ArgMatches) -> Result<(), Failure> {
    let server = Server::of(matches)?;
    let json = matches.get_flag("json");
    let text = match name {
        "status" => return status(&server, json),
        "groups" => {
            let groups = server.get("api/v1/groups")?;
            if json {
                pretty(&groups)
            } else {
                show::groups(&groups)
            }
        }
        "cluster" => {
            let cluster = server.cluster()?;
            if json {
                pretty(&cluster)
            } else {
                show::cluster(&cluster)
            }
        }
        "drain" | "undrain" => {
            let client = matches.get_one::<ClientId>("client");
            let client = client.map(ClientId::as_str).unwrap_or_default();
            let path = format!(
                "api/v1/groups/{}/members/{}/{name}",
                group(matches),
                segment(client)
            );
            let member = server.change(Method::Post, &path, None)?;
            let member = member.unwrap_or_default();
            match (json, name) {
                (true, _) => pretty(&member),
                (false, "drain") => show::drained(group(matches), &member),
                (false, _) => show::undrained(group(matches), &member),
            }
        }
        _ => {
            let group = group(matches);
            let group = server.get(&format!("api/v1/groups/{group}"))?;
            if json {
                pretty(&group)
            } else {
                show::members(&group)
            }
        }
    };
    print(&text);
    Ok(())
}

/// Runs `skyschedule groups delete`.
pub(super) fn delete_group(matches: &ArgMatches) -> Result<(), Failure> {
    let server = Server::of(matches)?;
    let name = group(matches);
    let deleted = server.change(Method::Delete, &format!("api/v1/groups/{name}"), None)?;
    let deleted = deleted.unwrap_or_else(|| json!({ "name": name }));
    print(&match matches.get_flag("json") {
        true => pretty(&deleted),
        false => format!("group {name} is deleted\n"),
    });
    Ok(())
}

/// The group that the command is about.
fn group(matches: &ArgMatches) -> &str {
    matches
        .get_one::<GroupName>("group")
        .map(GroupName::as_str)
        .unwrap_or_default()
}

/// Prints the status; one that does not serve is a failure, so that scripts can ask.
fn status(server: &Server, json: bool) -> Result<(), Failure> {
    let cluster = server.cluster()?;
    let not_ready = server.call(Method::Get, "readyz", None)?.err();
    let not_ready = not_ready.map(|refusal| refusal.text);
    // A server that is not ready may not know its groups either.
    let groups = server.call(Method::Get, "api/v1/groups", None)?;
    let problems = show::problems(&groups.unwrap_or_default());
    if json {
        let status = json!({
            "cluster": cluster,
            "ready": not_ready.is_none(),
            "reason": not_ready,
            "problems": problems,
        });
        print(&pretty(&status));
    } else {
        print(&show::status(&cluster, not_ready.as_deref(), &problems));
    }
    match not_ready {
        None => Ok(()),
        Some(reason) => Err(Failure::Failed(format!("not ready: {reason}"))),
    }
}

/// How a server is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
    Put,
    Delete,
}

/// The server's error.
#[derive(Debug)]
pub(super) struct Refusal {
    /// For programs.
    pub(super) code: String,
    /// For people.
    pub(super) text: String,
}

/// The admin interface of one server.
pub(super) struct Server {
    agent: Agent,
    place: String,
    patience: Duration,
    token: Option<SecretString>,
}

impl Server {
    /// The one that the command names.
    pub(super) fn of(matches: &ArgMatches) -> Result<Self, Failure> {
        let sources = sources(matches, &[ADMIN, ADMIN_TOKEN_FILE]);
        let admin = sources.text(&ADMIN).map_err(Failure::Usage)?;
        let token = sources
            .secret(&ADMIN_TOKEN, &ADMIN_TOKEN_FILE)
            .map_err(Failure::Usage)?;
        Self::new(&admin.unwrap_or_default(), token, PATIENCE)
    }

    /// `admin` is `host:port` or a URL.
    fn new(admin: &str, token: Option<SecretString>, patience: Duration) -> Result<Self, Failure> {
        if admin.starts_with("https://") {
            let text = "admin: this version speaks http:// only; for TLS use a tunnel or another HTTP client";
            return Err(Failure::Usage(text.into()));
        }
        let place = admin.strip_prefix("http://").unwrap_or(admin);
        let place = place.trim_end_matches('/');
        if place.is_empty() || place.contains(|c: char| c.is_whitespace() || "?#@".contains(c)) {
            let text = format!(
                "admin: {admin:?} is neither host:port nor a URL such as http://sky-1:9980"
            );
            return Err(Failure::Usage(text));
        }
        let agent = Agent::config_builder()
            .timeout_global(Some(patience))
            .timeout_connect(Some(CONNECT))
            .http_status_as_error(false)
            .max_redirects(0)
            // A proxy of the environment is for other hosts than this one.
            .proxy(None)
            .build()
            .into();
        Ok(Self {
            agent,
            place: place.to_owned(),
            patience,
            token,
        })
    }

    /// The replicas as this server sees them, and how much each of them lacks, which the leader is asked for.
    pub(super) fn cluster(&self) -> Result<Value, Failure> {
        let mut cluster = self.get("api/v1/cluster")?;
        self.add_lags(&mut cluster);
        Ok(cluster)
    }

    /// Only the leader knows how much each replica lacks; where it cannot be asked, that stays open.
    pub(super) fn add_lags(&self, cluster: &mut Value) {
        let leader = cluster["leader"].clone();
        if leader.is_null() || leader == cluster["replica_id"] {
            return;
        }
        let Ok(Ok(seen)) = self.call(Method::Get, "api/v1/cluster/replicas", None) else {
            return;
        };
        if seen["replica_id"] != leader {
            return;
        }
        let lags = seen["replicas"].as_array().into_iter().flatten();
        let lags: Vec<_> = lags
            .map(|replica| (&replica["id"], &replica["lag"]))
            .collect();
        for replica in cluster["replicas"].as_array_mut().into_iter().flatten() {
            let lag = lags.iter().find(|(id, _)| **id == replica["id"]);
            if let Some((_, lag)) = lag {
                replica["lag"] = (*lag).clone();
            }
        }
    }

    /// The answer to a change, which is the leader's to decide, and which any server passes on to it. While the servers elect
    /// one, asks again. None: what was to be deleted is not there any more, since the answer to an earlier question was lost
    /// with the leader that gave it.
    pub(super) fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Option<Value>, Failure> {
        let until = env::now() + ELECTED;
        let mut asked = 0;
        loop {
            asked += 1;
            let refusal = match self.call(method, path, body)? {
                Ok(answer) => return Ok(Some(answer)),
                Err(refusal) => refusal,
            };
            match refusal.code.as_str() {
                "no_leader" if env::now() < until => sleep(PAUSE),
                "not_found" if method == Method::Delete && asked > 1 => return Ok(None),
                _ => return Err(Failure::Failed(refusal.text)),
            }
        }
    }

    /// The answer to a question that must have one.
    fn get(&self, path: &str) -> Result<Value, Failure> {
        let answer = self.call(Method::Get, path, None)?;
        answer.map_err(|refusal| Failure::Failed(refusal.text))
    }

    /// The answer, or the server's error.
    fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Result<Value, Refusal>, Failure> {
        let place = self.place.as_str();
        let asked = Asked {
            place,
            connect: CONNECT,
            patience: self.patience,
            changes: method != Method::Get,
        };
        let unanswered = |error: ureq::Error| Failure::Failed(unanswered::why(asked, &error));
        let request = Request::builder()
            .method(match method {
                Method::Get => "GET",
                Method::Post => "POST",
                Method::Put => "PUT",
                Method::Delete => "DELETE",
            })
            .uri(format!("http://{place}/{path}"))
            // Calls that change something must say so, also without a body.
            .header("content-type", "application/json");
        let request = match &self.token {
            Some(token) => {
                request.header("authorization", format!("Bearer {}", token.expose_secret()))
            }
            None => request,
        };
        let body = body.map(Value::to_string).unwrap_or_default();
        let response = request
            .body(body)
            .map_err(ureq::Error::from)
            .and_then(|request| self.agent.run(request));
        let mut response = response.map_err(unanswered)?;
        let status = response.status();
        let body = response
            .body_mut()
            .with_config()
            .limit(MAX_ANSWER)
            .read_to_string()
            .map_err(unanswered)?;
        let value: Option<Value> = serde_json::from_str(&body).ok();
        if status.is_success() {
            return match value {
                Some(value) => Ok(Ok(value)),
                None => Err(Failure::Failed(foreign(place, status.as_u16()))),
            };
        }
        let error = |part: &str| Some(value.as_ref()?["error"][part].as_str()?.to_owned());
        Ok(Err(Refusal {
            code: error("code").unwrap_or_default(),
            text: error("message").unwrap_or_else(|| foreign(place, status.as_u16())),
        }))
    }
}

/// Something answers that is not ours.
fn foreign(place: &str, status: u16) -> String {
    format!(
        "{place} answers (HTTP {status}), but not as SkySchedule does: is this a server's admin address (--admin), with no proxy before it?"
    )
}

pub(super) fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value)
        .map_err(io::Error::from)
        .map(|text| text + "\n")
        .unwrap_or_default()
}

/// A name as one segment of a path: whatever it holds, it means nothing there.
fn segment(name: &str) -> String {
    utf8_percent_encode(name, NON_ALPHANUMERIC).to_string()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    /// What is said when whoever listens treats each caller so.
    fn said(method: Method, answer: impl Fn(TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        thread::spawn(move || listener.incoming().flatten().for_each(answer));
        let server = Server::new(&place, None, Duration::from_millis(300)).unwrap();
        let text = match server.call(method, "api/v1/groups", None) {
            Err(Failure::Failed(text)) => text,
            Ok(Err(refusal)) => refusal.text,
            other => panic!("{other:?}"),
        };
        assert!(text.contains(&place) && text.contains("--admin"), "{text}");
        text
    }

    #[test]
    fn whoever_does_not_answer_as_a_server_does_is_described_and_named() {
        let open = Mutex::new(Vec::new());
        let silent = said(Method::Get, move |stream| open.lock().unwrap().push(stream));
        assert!(silent.contains("no answer within 0.3 s"), "{silent}");
        assert!(!silent.contains("may be done"), "{silent}");
        let open = Mutex::new(Vec::new());
        let silent = said(Method::Post, move |stream| {
            open.lock().unwrap().push(stream);
        });
        assert!(silent.contains("may be done or not: ask again"), "{silent}");
        let says = |text: &'static str| {
            move |mut stream: TcpStream| {
                let _ = stream.read(&mut [0; 1_024]);
                let _ = stream.write_all(text.as_bytes());
            }
        };
        let ended = said(Method::Get, says(""));
        assert!(ended.contains("ended the connection"), "{ended}");
        let noise = said(Method::Get, says("\u{1}\u{2} 220 mail\r\n\r\n"));
        assert!(noise.contains("does not answer in HTTP"), "{noise}");
        for page in [
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        ] {
            let page = said(Method::Get, says(page));
            assert!(page.contains("not as SkySchedule does"), "{page}");
        }
    }

    #[test]
    fn a_host_that_is_not_there_is_named() {
        let said = |place: &str| match Server::new(place, None, PATIENCE).unwrap().get("readyz") {
            Err(Failure::Failed(text)) => text,
            other => panic!("{other:?}"),
        };
        let unknown = said("no-such-host.invalid:9980");
        let expected = "the name in no-such-host.invalid:9980 cannot be resolved";
        assert!(unknown.starts_with(expected), "{unknown}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        drop(listener);
        let nobody = said(&place);
        assert!(
            nobody.starts_with(&format!("nothing listens at {place}")),
            "{nobody}"
        );
    }

    #[test]
    fn a_client_id_means_nothing_within_a_path() {
        assert_eq!(segment("pod-1"), "pod%2D1");
        for id in ["y/drain?", "a%2fb", "...", "\"<`#"] {
            let encoded = segment(id);
            assert!(
                encoded
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'%'),
                "{encoded}"
            );
        }
        assert_eq!(segment("a%2fb"), "a%252fb");
    }
}
