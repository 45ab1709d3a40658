//! On real databases: `SKY_TEST_POSTGRES_URL` and `SKY_TEST_MYSQL_URL` (tests/run). One program, so that tests which wait do so
//! together.

#[macro_use]
mod common;
mod failures;
mod kept_slots;
mod ledger;
mod marks;
mod once;
mod tables;
