use super::world;
use std::future::Future;
use std::io;

pub use tokio::task::{JoinError, JoinHandle};

/// The process's I/O thread cannot be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot start the thread that serves SkySchedule's connections: {0}; \
     raise the limits on threads (ulimit -u) and open files (ulimit -n), then try again"
)]
pub struct IoThreadError(#[from] pub io::Error);

/// Runs `future` as a task of the present runtime. Dropping the handle leaves the task running.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    world::spawn(future)
}

/// Runs `work`, which may block (files, a database, key derivation), off the threads that serve connections.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn blocking<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    world::blocking(work)
}

/// Runs `future` on the process's one I/O thread, which starts at the first call and lives as long as
/// the process. Nothing of a user runs there, so that a heartbeat never waits for a handler. The caller
/// needs no runtime. Work that blocks or computes for long does not belong there.
///
/// # Errors
/// The system refuses the thread or its descriptors; the next call tries again.
pub fn io_spawn<F>(future: F) -> Result<JoinHandle<F::Output>, IoThreadError>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    world::io_spawn(future)
}

/// Runs `future`, and all that it spawns, on threads and a runtime of their own: whatever keeps the
/// present runtime busy delays nothing there. All that it spawned ends with it. The caller needs no runtime.
///
/// # Errors
/// The system refuses the threads or their descriptors.
pub fn spawn_apart<F>(name: &str, future: F) -> Result<(), IoThreadError>
where
    F: Future<Output = ()> + Send + 'static,
{
    world::spawn_apart(name, future)
}

#[cfg(test)]
#[cfg(not(sim))]
mod tests {
    use super::*;
    use crate::env;
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    /// The thread's id and name, asked for from a thread without a runtime.
    fn io_thread() -> (ThreadId, Option<String>) {
        thread::spawn(|| {
            let (tx, rx) = mpsc::channel();
            io_spawn(async move {
                env::sleep(Duration::from_millis(1)).await;
                let present = thread::current();
                tx.send((present.id(), present.name().map(str::to_owned)))
                    .unwrap();
            })
            .unwrap();
            rx.recv().unwrap()
        })
        .join()
        .unwrap()
    }

    #[test]
    fn one_io_thread_serves_every_caller_and_outlives_them() {
        let askers: Vec<_> = (0..8).map(|_| thread::spawn(io_thread)).collect();
        let mut answers: Vec<_> = askers
            .into_iter()
            .map(|asker| asker.join().unwrap())
            .collect();
        answers.push(io_thread());
        assert!(
            answers.iter().all(|answer| *answer == answers[0]),
            "{answers:?}"
        );
        assert_eq!(answers[0].1.as_deref(), Some("skyschedule-io"));
        assert_ne!(answers[0].0, thread::current().id());
    }

    #[test]
    fn a_panic_in_a_task_leaves_the_io_thread_alive() {
        let before = io_thread();
        let (tx, rx) = mpsc::channel::<()>();
        let task = io_spawn(async move {
            let _open = tx;
            panic!("on purpose");
        })
        .unwrap();
        assert!(rx.recv().is_err(), "the task has ended");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        assert!(runtime.block_on(task).unwrap_err().is_panic());
        assert_eq!(io_thread(), before);
    }

    #[test]
    fn what_runs_apart_ends_with_all_that_it_spawned() {
        let (tx, rx) = mpsc::channel();
        let (spawned, ended) = mpsc::channel::<()>();
        spawn_apart("apart", async move {
            spawn(async move {
                let _open = spawned;
                std::future::pending::<()>().await;
            });
            let present = thread::current();
            tx.send(present.name().map(str::to_owned)).unwrap();
        })
        .unwrap();
        assert_eq!(rx.recv().unwrap().as_deref(), Some("apart"));
        assert!(ended.recv().is_err(), "its tasks are gone");
    }

    #[tokio::test]
    async fn blocking_work_leaves_the_runtime_free() {
        let (tx, rx) = mpsc::channel();
        let work = blocking(move || rx.recv().unwrap());
        // On a runtime of one thread this line is reached only if the work blocks another one.
        tx.send(7).unwrap();
        assert_eq!(work.await.unwrap(), 7);
    }
}
