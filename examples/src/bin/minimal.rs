//! The smallest consumer: works through its share of `task_info` until Ctrl-C.

use skyschedule_client::Client;
use skyschedule_client::sql::{self, Table, Task};

async fn work(task: Task<(i64, Option<String>)>) -> Result<(), String> {
    let (id, data) = task.row();
    tracing::info!(id, ?data, "done");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let client = Client::builder().servers(["127.0.0.1:9991"]).group("1000");
    let client = client.credentials("moon", "walker").connect().await?;
    let table = Table::new("task_info").columns(["id", "task_data"]);
    let consumer = sql::consumer(&client, table);
    let consumer = consumer.connect("sqlite://tasks.db").await?;
    let stopper = consumer.stopper();
    let stop = async { tokio::signal::ctrl_c().await.map(|()| stopper.stop()) };
    let (counted, asked) = tokio::join!(consumer.run(work), stop);
    tracing::info!(done = counted.done, "what ran is finished and marked");
    client.close().await?; // now others have its rows
    Ok(asked?)
}
