//! Any name and password log in; anything else does not.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use skyschedule_common::auth::{
    AuthError, ClientExchange, Credentials, Decoys, MIN_ITERATIONS, ServerExchange, Signature,
    StoredUser, nonce,
};

/// One login up to the proof, which `change` may alter.
fn login(
    (user, password): (&str, &str),
    stored_password: &str,
    nonces: ([u8; 18], [u8; 18]),
    change: impl FnOnce(&mut Signature),
) -> Result<(), AuthError> {
    let decoys = Decoys::new([7; 32], MIN_ITERATIONS);
    let stored = StoredUser::derive(&stored_password.into(), decoys.salt(user), MIN_ITERATIONS)?;
    let client = ClientExchange::new(&Credentials::new(user, password)?, nonce(nonces.0))?;
    let (challenge, server) = ServerExchange::challenge(
        Some(&stored),
        &decoys,
        client.user(),
        client.nonce(),
        &nonce(nonces.1),
    )?;
    let (mut proof, check) = client.respond(&challenge)?;
    change(&mut proof);
    check.verify(&server.verify(&proof)?)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default()
    })]

    #[test]
    fn the_right_password_logs_in(user in "[^\\p{Cc}]{1,30}", password in ".{1,80}", nonces in any::<([u8; 18], [u8; 18])>()) {
        prop_assert_eq!(login((&user, &password), &password, nonces, |_| ()), Ok(()));
    }

    #[test]
    fn another_password_does_not(password in ".{1,20}", stored in ".{1,20}", nonces in any::<([u8; 18], [u8; 18])>()) {
        prop_assume!(password != stored);
        prop_assert_eq!(login(("moon", &password), &stored, nonces, |_| ()), Err(AuthError::Refused));
    }

    #[test]
    fn a_changed_proof_does_not(byte in 0..32_usize, flip in 1..=255_u8, nonces in any::<([u8; 18], [u8; 18])>()) {
        let refused = login(("moon", "walker"), "walker", nonces, |proof| proof[byte] ^= flip);
        prop_assert_eq!(refused, Err(AuthError::Refused));
    }
}
