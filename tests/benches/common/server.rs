//! The role of the server.

use std::time::Duration;

use serde_json::json;
use skyschedule_common::env;
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::{Millis, Numbering};
use skyschedule_server::Server;
use skyschedule_server::config::{Config, User};
use skyschedule_server::state::Settings;
use skyschedule_server::stderr::{Format, Stderr};
use skyschedule_tests::server::{PASSWORD, USER};

use super::Result;
use super::process::obey;

/// Connections that one process serves here.
const CONNECTIONS: usize = 19_000;

/// SkySchedule, as `skyschedule serve` runs it.
pub(crate) async fn serve(folder: &str) -> Result<()> {
    let format = Format::Text { colours: false };
    let stderr = Stderr::start(format);
    stderr.log(format, "openraft=off", "info")?;
    let mut config = Config::embedded(folder);
    config.users = vec![User::new(USER, PASSWORD)?];
    config.limits.max_connections = CONNECTIONS;
    config.limits.max_connections_per_address = CONNECTIONS;
    let server = Server::start(config).await?;
    obey(async |words| match words {
        ["address"] => Ok(json!(server.local_addr())),
        // The numbers are of slots, 0 for modulo, and of milliseconds of the lease, 0 for the usual one.
        ["found", group, slots, lease] => {
            let (slots, lease) = (slots.parse()?, lease.parse()?);
            let mut settings = Settings::default();
            if slots > 0 {
                settings.numbering = Numbering::Slots(slots);
            }
            if lease > 0 {
                settings.lease = Some(Millis(lease));
                settings.drain_timeout = Millis(lease / 2);
            }
            server
                .handle()
                .configure(GroupName::new(*group)?, settings)
                .await?;
            Ok(json!(()))
        }
        ["handovers", group] => {
            let text = server.metrics().encode();
            let start = format!("skyschedule_handovers_total{{group=\"{group}\"}}");
            let count = text.lines().find_map(|line| line.strip_prefix(&start));
            Ok(json!(
                count.map_or(Ok(0), |count| count.trim().parse::<u64>())?
            ))
        }
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await?;
    server.shutdown().await?;
    Ok(())
}

/// Until the next renumbering may begin: in a group whose members come and go all the time, the server keeps
/// them apart by 24 times the length of the last one, up to 10 s.
pub(crate) async fn rest(took: Duration) {
    let distance = (took * 25).min(Duration::from_millis(10_100));
    env::sleep(distance.max(took * 2) + Duration::from_millis(50)).await;
}
