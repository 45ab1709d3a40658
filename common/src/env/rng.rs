//! Randomness: the operating system's, cryptographically secure; in the simulation, each host's own seed's.

use super::world;
use std::time::Duration;

/// Fills `buffer` with random bytes, fit for keys, nonces and identities.
pub fn fill(buffer: &mut [u8]) {
    world::fill(buffer);
}

/// A random number.
pub fn u64() -> u64 {
    let mut bytes = [0; 8];
    fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// A random number below `bound`; 0 if `bound` is 0.
pub fn below(bound: u64) -> u64 {
    // The high half of a 128-bit product: its bias is below bound / 2^64.
    let product = u128::from(u64()) * u128::from(bound);
    u64::try_from(product >> 64).unwrap_or(0)
}

/// A random duration between `duration * (1 - fraction)` and `duration`, both included; `fraction` from 0 to 1.
pub fn jitter(duration: Duration, fraction: f64) -> Duration {
    let fraction = if fraction.is_finite() {
        fraction.clamp(0.0, 1.0)
    } else {
        0.0
    };
    let span = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let span = Duration::from_nanos(span).mul_f64(fraction).min(duration);
    let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    duration - Duration::from_nanos(below(nanos.saturating_add(1)).min(nanos))
}

#[cfg(test)]
#[cfg(not(sim))]
mod tests {
    use super::*;

    #[test]
    fn below_reaches_every_number_and_no_other() {
        let mut seen = [false; 5];
        for _ in 0..2_000 {
            seen[usize::try_from(below(5)).unwrap()] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!((below(0), below(1)), (0, 0));
    }

    #[test]
    fn jitter_stays_within_its_fraction() {
        let base = Duration::from_secs(10);
        let drawn: Vec<_> = (0..1_000).map(|_| jitter(base, 0.2)).collect();
        assert!(
            drawn
                .iter()
                .all(|d| (Duration::from_secs(8)..=base).contains(d))
        );
        let (low, high) = (drawn.iter().min().unwrap(), drawn.iter().max().unwrap());
        assert!(
            *high - *low > Duration::from_secs(1),
            "spread over the range: {low:?} to {high:?}"
        );
        assert_eq!(jitter(base, 0.0), base);
        assert!(jitter(base, 7.0) <= base);
        assert_eq!(jitter(base, f64::NAN), base);
        assert!(jitter(Duration::MAX, 1.0) <= Duration::MAX);
    }

    #[test]
    fn bytes_differ_from_call_to_call() {
        let (mut a, mut b) = ([0; 16], [0; 16]);
        fill(&mut a);
        fill(&mut b);
        assert_ne!(a, b);
        assert_ne!(a, [0; 16]);
    }
}
