//! The `skyschedule` binary.
fn main() {}
