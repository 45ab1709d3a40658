//! The simulated world itself: its clocks, pauses, resets and kills are what they claim to be.
#![allow(clippy::unwrap_used, reason = "a test may")]

#[cfg(not(sim))]
compile_error!(
    "this is a simulation: build it with RUSTFLAGS='--cfg tokio_unstable --cfg sim', or use tests/run --sim"
);

use skyschedule_common::env::net::{Ending, Stream, TcpListener, ending, resolve};
use skyschedule_common::env::sim::{Host, RATE_BOUND_PPM, World, kill};
use skyschedule_common::env::{self, Elapsed, Instant, rng};
use skyschedule_common::fault::{self, Rule};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use turmoil::Sim;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn new_sim(seed: u64) -> Sim<'static> {
    turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(MS)
        .simulation_duration(Duration::from_secs(3600))
        .tcp_capacity(1024)
        .build()
}

/// Adds `host` to `sim`; its software is made anew at each start.
fn add<F, S>(sim: &mut Sim<'static>, host: &Arc<Host>, software: S)
where
    F: Future<Output = turmoil::Result> + 'static,
    S: Fn() -> F + 'static,
{
    let process = Arc::clone(host);
    sim.host(host.name(), move || process.run(software()));
}

fn run_for(sim: &mut Sim<'_>, duration: Duration) {
    let end = sim.elapsed() + duration;
    while sim.elapsed() < end {
        sim.step().unwrap();
    }
}

fn assert_near(found: Duration, expected: Duration, tolerance: Duration) {
    assert!(
        found.abs_diff(expected) <= tolerance,
        "{found:?} instead of {expected:?} ± {tolerance:?}"
    );
}

#[test]
fn clocks_drift_by_their_rate_and_sleeps_with_them() {
    for ppm in [-1_000, 0, 1_000, 100_000] {
        let world = World::new(1);
        let host = world.host_with_drift("host", ppm);
        let mut sim = new_sim(1);
        let woken = Rc::new(Cell::new(None));
        let told = woken.clone();
        add(&mut sim, &host, move || {
            let told = told.clone();
            async move {
                let start = env::now();
                env::sleep(100 * SECOND).await;
                told.set(Some((start.elapsed(), turmoil::sim_elapsed().unwrap())));
                Ok(())
            }
        });
        run_for(&mut sim, 115 * SECOND);

        let (by_its_clock, by_true_time) = woken.get().unwrap();
        assert!(
            by_its_clock >= 100 * SECOND,
            "never too early: {by_its_clock:?}"
        );
        assert_near(by_its_clock, 100 * SECOND, 5 * MS);
        let rate = 1.0 + f64::from(ppm) / 1e6;
        assert_near(by_true_time, (100 * SECOND).div_f64(rate), 5 * MS);
        let shown = host
            .clock_at(sim.elapsed())
            .saturating_duration_since(host.clock_at(Duration::ZERO));
        assert_near(shown, sim.elapsed().mul_f64(rate), MS);
    }
}

#[test]
fn drawn_rates_stay_within_the_bound_and_differ() {
    let bound = i64::from(RATE_BOUND_PPM);
    let rates: Vec<_> = (0..100)
        .map(|seed| World::new(seed).host("host").drift_ppm())
        .collect();
    assert!(rates.iter().all(|rate| (-bound..=bound).contains(rate)));
    assert!(
        rates.iter().any(|rate| *rate > bound / 2) && rates.iter().any(|rate| *rate < -bound / 2)
    );
}

#[test]
fn a_paused_process_does_nothing_and_its_clock_has_jumped_afterwards() {
    let world = World::new(2);
    let host = world.host_with_drift("host", 0);
    let mut sim = new_sim(2);
    let ticks: Rc<RefCell<Vec<Instant>>> = Rc::default();
    let busy = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let (log, count) = (ticks.clone(), busy.clone());
    add(&mut sim, &host, move || {
        let (log, count) = (log.clone(), count.clone());
        async move {
            // A task that never waits for time or network: stopped all the same.
            env::spawn(async move {
                loop {
                    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    tokio::task::yield_now().await;
                    env::sleep(MS).await;
                }
            });
            loop {
                env::sleep(10 * MS).await;
                log.borrow_mut().push(env::now());
            }
        }
    });
    run_for(&mut sim, 100 * MS);
    let (ticked, counted) = (
        ticks.borrow().len(),
        busy.load(std::sync::atomic::Ordering::Relaxed),
    );
    assert!(ticked > 5 && counted > 50);

    host.pause();
    run_for(&mut sim, 5 * SECOND);
    assert_eq!(ticks.borrow().len(), ticked);
    assert_eq!(busy.load(std::sync::atomic::Ordering::Relaxed), counted);

    host.resume();
    run_for(&mut sim, 50 * MS);
    let after = ticks.borrow()[ticked];
    assert_near(
        after.saturating_duration_since(ticks.borrow()[ticked - 1]),
        5 * SECOND,
        20 * MS,
    );
    assert!(ticks.borrow().len() > ticked + 2, "it goes on");
}

#[test]
fn after_a_suspend_a_sleep_ends_late_but_within_a_second() {
    let world = World::new(3);
    let host = world.host_with_drift("host", 0);
    let mut sim = new_sim(3);
    let woken = Rc::new(Cell::new(None));
    let told = woken.clone();
    add(&mut sim, &host, move || {
        let told = told.clone();
        async move {
            env::sleep(10 * SECOND).await;
            told.set(turmoil::sim_elapsed());
            std::future::pending().await
        }
    });
    run_for(&mut sim, SECOND / 2);
    host.suspend();
    run_for(&mut sim, 60 * SECOND);
    host.resume();
    assert_eq!(woken.get(), None);
    let resumed = sim.elapsed();
    run_for(&mut sim, 2 * SECOND);
    let late = woken.get().unwrap() - resumed;
    assert!(late > 100 * MS && late <= SECOND + 5 * MS, "{late:?}");
}

#[test]
fn a_jump_shows_at_once_in_the_clock_and_soon_in_sleeps() {
    let world = World::new(4);
    let host = world.host_with_drift("host", 0);
    let mut sim = new_sim(4);
    let woken = Rc::new(Cell::new(None));
    let told = woken.clone();
    add(&mut sim, &host, move || {
        let told = told.clone();
        async move {
            env::sleep(30 * SECOND).await;
            told.set(turmoil::sim_elapsed());
            std::future::pending().await
        }
    });
    run_for(&mut sim, 500 * MS);
    let before = host.clock_at(sim.elapsed());
    host.jump(60 * SECOND);
    assert_eq!(host.clock_at(sim.elapsed()), before + 60 * SECOND);
    run_for(&mut sim, 2 * SECOND);
    assert!(woken.get().unwrap() <= 1_600 * MS);
}

/// What the server saw of the connections of its clients: what came, and how each ended.
type Seen = Rc<RefCell<Vec<(Vec<u8>, Ending)>>>;

/// A server that reads each of its connections to the end, one after the other.
fn add_server(sim: &mut Sim<'static>, host: &Arc<Host>, seen: &Seen) {
    let seen = seen.clone();
    add(sim, host, move || {
        let seen = seen.clone();
        async move {
            let listener = TcpListener::bind(([0, 0, 0, 0], 9991).into(), 128).await?;
            loop {
                let (mut stream, from) = listener.accept().await?;
                assert_eq!(stream.peer_addr()?, from);
                let (mut all, mut buffer) = (Vec::new(), [0; 16]);
                let end = loop {
                    let read = stream.read(&mut buffer).await;
                    if let Some(end) = ending(&read) {
                        break end;
                    }
                    all.extend_from_slice(&buffer[..read?]);
                };
                // The end is sticky.
                assert_eq!(ending(&stream.read(&mut buffer).await), Some(end));
                seen.borrow_mut().push((all, end));
            }
        }
    });
}

async fn connect() -> std::io::Result<Stream> {
    Stream::connect(resolve("server:9991").await?[0]).await
}

/// Runs `client` against a server, and kills it after two seconds.
fn against_server<F, S>(client: S) -> Vec<(Vec<u8>, Ending)>
where
    F: Future<Output = turmoil::Result> + 'static,
    S: Fn() -> F + 'static,
{
    let world = World::new(5);
    let (server, host) = (world.host("server"), world.host("client"));
    let mut sim = new_sim(5);
    let seen = Seen::default();
    add_server(&mut sim, &server, &seen);
    add(&mut sim, &host, client);
    run_for(&mut sim, 2 * SECOND);
    kill(&mut sim, &host);
    run_for(&mut sim, SECOND);
    seen.take()
}

#[test]
fn a_dropped_client_stream_ends_with_a_reset_and_an_announced_end_is_a_fin() {
    let software = || async {
        let mut dropped = connect().await?;
        dropped.write_all(b"one").await?;
        dropped.shutdown().await?;
        dropped.write_all(b" more").await?;
        drop(dropped);

        let mut announced = connect().await?;
        announced.write_all(b"two").await?;
        announced.end_with_fin();
        announced.shutdown().await?;
        assert_eq!(
            announced.read(&mut [0]).await?,
            0,
            "the server's end comes as a FIN"
        );
        drop(announced);

        let mut aborted = env::spawn(async {
            let _open = connect().await.unwrap();
            std::future::pending::<()>().await;
        });
        assert_eq!(
            env::timeout(SECOND / 2, &mut aborted).await.unwrap_err(),
            Elapsed
        );
        aborted.abort();
        std::future::pending().await
    };
    let fin = (b"two".to_vec(), Ending::Fin);
    assert_eq!(
        against_server(software),
        [
            (b"one more".to_vec(), Ending::Reset),
            fin.clone(),
            (vec![], Ending::Reset)
        ]
    );
    let broken = fault::breaking(Rule::F3, || against_server(software));
    assert_eq!(
        broken,
        [
            (b"one more".to_vec(), Ending::Fin),
            fin,
            (vec![], Ending::Fin)
        ]
    );
    assert!(!fault::broken(Rule::F3));
}

#[test]
fn a_killed_process_shows_a_fin_also_of_its_tasks_and_while_it_is_paused() {
    let software = || async {
        let mut stream = connect().await?;
        stream.write_all(b"one").await?;
        env::spawn(async move {
            let _open = stream;
            std::future::pending::<()>().await;
        });
        std::future::pending().await
    };
    assert_eq!(against_server(software), [(b"one".to_vec(), Ending::Fin)]);

    // The root future, which is dropped when its runtime is gone already.
    let software = || async {
        let mut stream = connect().await?;
        stream.write_all(b"two").await?;
        env::sleep(SECOND).await;
        env::sim::current().pause();
        std::future::pending().await
    };
    assert_eq!(against_server(software), [(b"two".to_vec(), Ending::Fin)]);
}

#[test]
fn a_restarted_process_ends_without_goodbye_in_resets_and_its_clock_goes_on() {
    let world = World::new(6);
    let (server, host) = (world.host("server"), world.host("client"));
    let mut sim = new_sim(6);
    let seen = Seen::default();
    add_server(&mut sim, &server, &seen);
    let starts: Rc<RefCell<Vec<Instant>>> = Rc::default();
    let log = starts.clone();
    add(&mut sim, &host, move || {
        let log = log.clone();
        async move {
            log.borrow_mut().push(env::now());
            let _open = connect().await?;
            std::future::pending().await
        }
    });
    run_for(&mut sim, SECOND);
    // Restarted while it runs: the software's own drops count.
    sim.bounce("client");
    run_for(&mut sim, SECOND);
    assert_eq!(seen.take(), [(vec![], Ending::Reset)]);

    host.pause();
    kill(&mut sim, &host);
    run_for(&mut sim, SECOND);
    assert_eq!(seen.take(), [(vec![], Ending::Fin)]);
    sim.bounce("client");
    run_for(&mut sim, SECOND);
    let starts = starts.borrow();
    assert_eq!(
        starts.len(),
        3,
        "a killed process is not stopped any more when it starts"
    );
    assert_near(
        starts[1].saturating_duration_since(starts[0]),
        SECOND,
        10 * MS,
    );
    assert_near(
        starts[2].saturating_duration_since(starts[1]),
        2 * SECOND,
        10 * MS,
    );
}

#[test]
fn sockets_of_a_paused_server_wait_while_its_kernel_takes_connections_and_bytes() {
    let world = World::new(7);
    let (server, host) = (world.host("server"), world.host("client"));
    let mut sim = new_sim(7);
    let seen = Seen::default();
    add_server(&mut sim, &server, &seen);
    let step = Rc::new(Cell::new(0));
    let told = step.clone();
    add(&mut sim, &host, move || {
        let told = told.clone();
        async move {
            let mut first = connect().await?;
            env::sleep(SECOND).await;
            for byte in 0..50 {
                first.write_u8(byte).await?;
            }
            drop(first);
            let mut second = connect().await?;
            second.write_all(b"second").await?;
            second.end_with_fin();
            second.shutdown().await?;
            told.set(1);
            std::future::pending().await
        }
    });
    run_for(&mut sim, SECOND / 2);
    server.pause();
    run_for(&mut sim, 5 * SECOND);
    assert_eq!(step.get(), 1, "to the client, a stopped server looks alive");
    assert!(seen.borrow().is_empty());
    server.resume();
    run_for(&mut sim, SECOND);
    assert_eq!(
        seen.take(),
        [
            ((0..50).collect(), Ending::Reset),
            (b"second".to_vec(), Ending::Fin)
        ]
    );
}

/// What a library does: spawn tasks that know nothing of the simulated host.
#[test]
fn tasks_spawned_past_the_seam_find_their_host_and_their_sockets_pause() {
    let world = World::new(8);
    let (server, host) = (world.host("server"), world.host_with_drift("client", 7));
    let mut sim = new_sim(8);
    let seen = Seen::default();
    add_server(&mut sim, &server, &seen);
    add(&mut sim, &host, || async {
        #[expect(clippy::disallowed_methods, reason = "as a library does")]
        let foreign = tokio::spawn(async {
            assert_eq!(env::sim::current().drift_ppm(), 7);
            let mut stream = connect().await.unwrap();
            env::sleep(SECOND).await;
            stream.write_all(b"late").await.unwrap();
            stream.end_with_fin();
        });
        foreign.await?;
        Ok(())
    });
    run_for(&mut sim, SECOND / 2);
    host.pause();
    run_for(&mut sim, 3 * SECOND);
    assert!(seen.borrow().is_empty());
    host.resume();
    run_for(&mut sim, SECOND);
    assert_eq!(seen.take(), [(b"late".to_vec(), Ending::Fin)]);
}

/// Three clients chat with a server over a slow network, with pauses and kills; every host notes what it sees.
fn trace(seed: u64) -> Vec<String> {
    let world = World::new(seed);
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .min_message_latency(MS)
        .max_message_latency(20 * MS)
        .tcp_capacity(1024)
        .build();
    let log: Rc<RefCell<Vec<String>>> = Rc::default();
    let server = world.host("server");
    let note = log.clone();
    add(&mut sim, &server, move || {
        let note = note.clone();
        async move {
            let listener = TcpListener::bind(([0, 0, 0, 0], 9991).into(), 128).await?;
            loop {
                let (mut stream, from) = listener.accept().await?;
                note.borrow_mut()
                    .push(format!("{:?} accepted {from}", env::now()));
                env::spawn(async move {
                    let mut number = [0; 8];
                    while stream.read_exact(&mut number).await.is_ok() {
                        env::sleep(rng::jitter(10 * MS, 0.9)).await;
                        if stream.write_all(&number).await.is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    let mut clients = Vec::new();
    for name in ["a", "b", "c"] {
        let client = world.host(name);
        let note = log.clone();
        add(&mut sim, &client, move || {
            let note = note.clone();
            async move {
                let mut stream = connect().await?;
                loop {
                    let number = rng::below(1_000_000);
                    stream.write_u64(number).await?;
                    let answer = env::timeout(200 * MS, stream.read_u64()).await;
                    let (name, now) = (env::sim::current().name().to_owned(), env::now());
                    note.borrow_mut().push(format!(
                        "{now:?} {name} {number} {answer:?} {}",
                        env::unix_micros()
                    ));
                    env::blocking(|| ()).await?;
                }
            }
        });
        clients.push(client);
    }
    for round in 0..10 {
        run_for(&mut sim, 100 * MS);
        match round % 3 {
            0 => clients[0].pause(),
            1 => kill(&mut sim, &clients[1]),
            _ => {
                clients[0].resume();
                sim.bounce("b");
            }
        }
    }
    log.take()
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let first = trace(42);
    assert!(first.len() > 50, "{}", first.len());
    assert_eq!(first, trace(42));
    assert_ne!(first, trace(43));
}
