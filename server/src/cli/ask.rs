//! Commands that ask a running server.

use std::io;
use std::time::Duration;

use clap::ArgMatches;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_server::config::{ADMIN, ADMIN_TOKEN, ADMIN_TOKEN_FILE};
use ureq::Agent;
use ureq::http::Request;

use super::{Failure, print, show, sources};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(15);

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
            let cluster = server.get("api/v1/cluster")?;
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
            let member = server.post(&path)?;
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
    let deleted = server.must(Method::Delete, &format!("api/v1/groups/{name}"), None)?;
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
    let cluster = server.get("api/v1/cluster")?;
    let not_ready = server.call(Method::Get, "readyz", None)?.err();
    let not_ready = not_ready.map(|refusal| refusal.text);
    // A server that is not ready may not know its groups either.
    let groups = server.call(Method::Get, "api/v1/groups", None)?;
    let problems = show::problems(&groups.unwrap_or_default());
    if json {
        let status = serde_json::json!({
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
#[derive(Debug, Clone, Copy)]
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
    url: String,
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
        Self::new(&admin.unwrap_or_default(), token)
    }

    /// `admin` is `host:port` or a URL.
    fn new(admin: &str, token: Option<SecretString>) -> Result<Self, Failure> {
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
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .max_redirects(0)
            // A proxy of the environment is for other hosts than this one.
            .proxy(None)
            .build()
            .into();
        Ok(Self {
            agent,
            url: format!("http://{place}"),
            token,
        })
    }

    /// The answer to a call that must succeed.
    fn get(&self, path: &str) -> Result<Value, Failure> {
        self.must(Method::Get, path, None)
    }

    /// The answer to a call that changes something and must succeed.
    fn post(&self, path: &str) -> Result<Value, Failure> {
        self.must(Method::Post, path, None)
    }

    /// The answer to a call that must succeed.
    pub(super) fn must(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, Failure> {
        let answer = self.call(method, path, body)?;
        answer.map_err(|refusal| Failure::Failed(refusal.text))
    }

    /// The answer, or the server's error.
    pub(super) fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Result<Value, Refusal>, Failure> {
        let url = format!("{}/{path}", self.url);
        let unreachable = |error: ureq::Error| {
            Failure::Failed(format!(
                "no answer from {url}: {error}; is the server running, and is this its admin address (--admin)?"
            ))
        };
        let request = Request::builder()
            .method(match method {
                Method::Get => "GET",
                Method::Post => "POST",
                Method::Put => "PUT",
                Method::Delete => "DELETE",
            })
            .uri(&url)
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
        let mut response = response.map_err(unreachable)?;
        let status = response.status();
        let body = response
            .body_mut()
            .with_config()
            .limit(MAX_ANSWER)
            .read_to_string()
            .map_err(unreachable)?;
        let value: Option<Value> = serde_json::from_str(&body).ok();
        if status.is_success() {
            return match value {
                Some(value) => Ok(Ok(value)),
                None => Err(Failure::Failed(format!(
                    "{url} answers, but not as SkySchedule does"
                ))),
            };
        }
        let error = |part: &str| Some(value.as_ref()?["error"][part].as_str()?.to_owned());
        Ok(Err(Refusal {
            code: error("code").unwrap_or_default(),
            text: error("message").unwrap_or_else(|| format!("{url} answers {status}")),
        }))
    }
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
    use super::*;

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
