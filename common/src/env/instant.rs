use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A point in time of this process's own clock, which never goes back and counts suspend.
///
/// It is meaningful only within one run of one machine: two machines' instants are never compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// From the clock's reading, in nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The clock's reading, in nanoseconds since an origin of its own.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this instant; zero if `earlier` is not earlier.
    pub const fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The time from this instant until now; zero if it lies in the future.
    pub fn elapsed(self) -> Duration {
        super::now().saturating_duration_since(self)
    }
}

/// Nanoseconds of a duration, at most the 584 years that an instant can tell.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Saturates at the end of time.
impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

/// Saturates at the clock's origin.
impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instant({:?})", Duration::from_nanos(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let early = Instant::from_nanos(5);
        let end = Instant::from_nanos(u64::MAX);
        assert_eq!(early - Duration::from_secs(1), Instant::from_nanos(0));
        assert_eq!(early + Duration::MAX, end);
        assert_eq!(early.saturating_duration_since(end), Duration::ZERO);
        assert_eq!(
            (early + Duration::from_nanos(7)).saturating_duration_since(early),
            Duration::from_nanos(7)
        );
    }
}
