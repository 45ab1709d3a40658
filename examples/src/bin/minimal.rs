//! The smallest consumer: works through its share of `task_info` until Ctrl-C.

use std::error::Error;

use skyschedule_client::Client;
use skyschedule_client::sql::{self, Table, Task};

async fn work(task: Task<(i64, Option<String>)>) -> Result<(), String> {
    let (id, data) = task.row();
    tracing::info!(id, ?data, "done");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().init();
    let client = Client::builder()
        .servers(["127.0.0.1:9991"])
        .group("1000")
        .credentials("moon", "walker")
        .connect()
        .await?;
    let table = Table::new("task_info").columns(["id", "task_data"]);
    let consumer = sql::consumer(&client, table)
        .connect("sqlite://tasks.db")
        .await?;
    let stopper = consumer.stopper();
    tokio::select! {
        _ = consumer.run(work) => {}
        _ = tokio::signal::ctrl_c() => stopper.stop(),
    }
    client.close().await?; // what runs is finished; then others have its rows
    Ok(())
}
