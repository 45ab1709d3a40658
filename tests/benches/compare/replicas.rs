//! Three replicas of SkySchedule: `skyschedule serve` with `--peers`, as anybody starts it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use skyschedule_common::env;
use skyschedule_tests::admin::Admin;
use skyschedule_tests::server::{PASSWORD, USER};
use tokio::process::{Child, Command};

use crate::common::Result;
use crate::servers::{PATIENCE, free_ports};

/// Running replicas.
pub(crate) struct Replicas {
    pub(crate) processes: Vec<Child>,
    listen: Vec<SocketAddr>,
    admin: Vec<SocketAddr>,
}

impl Replicas {
    /// Starts three, and waits until they number clients.
    pub(crate) async fn start(folder: &Path) -> Result<Self> {
        let program = program()?;
        let ports = free_ports::<6>()?.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let (listen, admin) = ports.split_at(3);
        let peers: Vec<String> = (1..)
            .zip(listen)
            .map(|(id, address)| format!("{id}={address}"))
            .collect();
        let start = |at: usize| {
            Command::new(&program)
                .arg("serve")
                .args(["--listen", &listen[at].to_string()])
                .args(["--admin", &admin[at].to_string()])
                .args(["--replica-id", &(at + 1).to_string()])
                .args(["--peers", &peers.join(",")])
                .args(["--user", USER])
                .arg("--data-dir")
                .arg(folder.join(at.to_string()))
                .env("SKY_PASSWORD", PASSWORD)
                .env("RUST_LOG", "warn")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .kill_on_drop(true)
                .spawn()
        };
        let replicas = Self {
            processes: (0..3).map(start).collect::<std::io::Result<_>>()?,
            listen: listen.to_vec(),
            admin: admin.to_vec(),
        };
        let deadline = env::now() + PATIENCE;
        for at in 0..3 {
            while !replicas.admin(at).is_ready().await {
                if env::now() > deadline {
                    return Err(format!("replica {} is not ready", at + 1).into());
                }
                env::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(replicas)
    }

    pub(crate) fn admin(&self, at: usize) -> Admin {
        Admin::new(self.admin[at])
    }

    pub(crate) fn admin_address(&self, at: usize) -> SocketAddr {
        self.admin[at]
    }

    pub(crate) fn address(&self, at: usize) -> SocketAddr {
        self.listen[at]
    }

    pub(crate) fn addresses(&self) -> String {
        let addresses: Vec<String> = self.listen.iter().map(ToString::to_string).collect();
        addresses.join(",")
    }

    /// The place of the leader; waits until there is one.
    pub(crate) async fn leader(&self) -> Result<usize> {
        let deadline = env::now() + PATIENCE;
        while env::now() < deadline {
            for at in 0..self.admin.len() {
                let (_, body) = self.admin(at).get("/api/v1/cluster").await;
                let view: Value = serde_json::from_str(&body)?;
                // What it says of itself is never old.
                if view["leader"].as_u64() == Some(at as u64 + 1) {
                    return Ok(at);
                }
            }
            env::sleep(Duration::from_millis(20)).await;
        }
        Err("the replicas have no leader".into())
    }
}

/// The binary: in `SKY_BIN_DIR`, or where cargo builds it beside this benchmark.
fn program() -> Result<PathBuf> {
    let folder = match std::env::var_os("SKY_BIN_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => {
            let this = std::env::current_exe()?;
            this.ancestors().nth(2).unwrap_or(&this).to_owned()
        }
    };
    let program = folder.join("skyschedule");
    if program.is_file() {
        return Ok(program);
    }
    let program = program.display();
    Err(format!("{program} is missing: cargo build --profile bench --bin skyschedule").into())
}
