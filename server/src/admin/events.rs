//! What happens, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, watch};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::{Server, stopped};
use crate::view::ServerEvent;

/// Told to a reader that was too slow: it should read `/api/v1/groups` anew.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Missed {
    /// Always `missed`.
    event: &'static str,
    /// How many events are lost.
    count: u64,
}

struct Watcher {
    events: Receiver<ServerEvent>,
    stop: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
}

/// What happens from now on. A reader that falls behind gets an event `missed`.
#[utoipa::path(get, path = "/api/v1/events", tag = "groups", responses(
    (status = 200, body = ServerEvent, content_type = "text/event-stream",
        description = "A stream; `event:` is the field event of the JSON in `data:`"),
    (status = 503, body = ErrorBody, description = "Too many callers watch"),
))]
pub(super) async fn events(
    State(shared): Server,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let permit = Arc::clone(&shared.watchers)
        .try_acquire_owned()
        .map_err(|_| {
            ApiError::Unavailable("too many callers watch events; try again later".into())
        })?;
    let watcher = Watcher {
        events: shared.handle.events(),
        stop: shared.stop.clone(),
        _permit: permit,
    };
    let events = stream::unfold(watcher, async |mut watcher| {
        let event = watcher.next().await?;
        Some((Ok(event), watcher))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

impl Watcher {
    async fn next(&mut self) -> Option<Event> {
        let received = tokio::select! {
            biased;
            () = stopped(&mut self.stop) => return None,
            received = self.events.recv() => received,
        };
        match received {
            Ok(event) => Some(named(&event)),
            Err(RecvError::Lagged(count)) => {
                let event = "missed";
                Some(named(&Missed { event, count }))
            }
            Err(RecvError::Closed) => None,
        }
    }
}

/// The event under the name that its field `event` has.
fn named(event: &impl Serialize) -> Event {
    // Our events are plain structures, which always become JSON.
    let json = serde_json::to_value(event).unwrap_or_default();
    let name = json["event"].as_str().unwrap_or("message");
    Event::default().event(name).data(json.to_string())
}

#[cfg(test)]
mod tests {
    use tokio::sync::broadcast;

    use super::*;

    #[tokio::test]
    async fn a_slow_reader_is_told_that_it_missed_events() {
        let (sender, events) = broadcast::channel(2);
        let (stopping, stop) = watch::channel(false);
        let permit = Arc::new(tokio::sync::Semaphore::new(1));
        let mut watcher = Watcher {
            events,
            stop,
            _permit: permit.acquire_owned().await.unwrap(),
        };
        for replica_id in 1..=5 {
            sender.send(ServerEvent::Leader { replica_id }).unwrap();
        }
        let missed = Missed {
            event: "missed",
            count: 3,
        };
        let text = |event: &Event| format!("{event:?}");
        let next = watcher.next().await.unwrap();
        assert_eq!(text(&next), text(&named(&missed)));
        let next = watcher.next().await.unwrap();
        assert_eq!(
            text(&next),
            text(&named(&ServerEvent::Leader { replica_id: 4 }))
        );
        stopping.send(true).unwrap();
        assert!(watcher.next().await.is_none());
    }
}
