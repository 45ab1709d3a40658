use super::*;

const RFC_SALT: &str = "W22ZaJ0SNY7soEsUEjb6gQ==";

fn decode<const N: usize>(base64: &str) -> [u8; N] {
    BASE64.decode(base64).unwrap().try_into().unwrap()
}

fn decoys() -> Decoys {
    Decoys::new([7; 32], MIN_ITERATIONS)
}

fn moon() -> StoredUser {
    StoredUser::derive(&"walker".into(), decoys().salt("moon"), MIN_ITERATIONS).unwrap()
}

fn client(user: &str, password: &str) -> ClientExchange {
    ClientExchange::new(&Credentials::new(user, password).unwrap(), nonce([1; 18])).unwrap()
}

fn challenge(
    stored: Option<&StoredUser>,
    client: &ClientExchange,
    server_nonce: u8,
) -> (Challenge, ServerExchange) {
    ServerExchange::challenge(
        stored,
        &decoys(),
        client.user(),
        client.nonce(),
        &nonce([server_nonce; 18]),
    )
    .unwrap()
}

/// RFC 7677, section 3.
#[test]
fn the_test_vector_of_rfc_7677_holds_on_both_sides() {
    let salt = Salt::try_from(BASE64.decode(RFC_SALT).unwrap()).unwrap();
    let stored = StoredUser::derive(&"pencil".into(), salt, 4_096).unwrap();
    let client = ClientExchange::new(
        &Credentials::new("user", "pencil").unwrap(),
        Nonce::try_from("rOprNGfwEbeRWgbNEkqO").unwrap(),
    )
    .unwrap();
    let server_nonce = Nonce::try_from("%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0").unwrap();
    let (challenge, server) = ServerExchange::challenge(
        Some(&stored),
        &decoys(),
        "user",
        client.nonce(),
        &server_nonce,
    )
    .unwrap();
    assert_eq!(
        challenge.nonce.as_str(),
        "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    );

    let (proof, check) = client.respond(&challenge).unwrap();
    assert_eq!(
        proof,
        decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    );
    let signature = server.verify(&proof).unwrap();
    assert_eq!(
        signature,
        decode("6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    );
    check.verify(&signature).unwrap();
}

#[test]
fn names_cannot_forge_fields_of_the_signed_text() {
    let message = scram::auth_message("a,r=x", "cccc", "ccccssss", b"salt", 4_096);
    assert_eq!(
        message,
        "n=a=2Cr=3Dx,r=cccc,r=ccccssss,s=c2FsdA==,i=4096,c=biws,r=ccccssss"
    );
}

#[test]
fn a_wrong_password_and_an_unknown_user_are_refused_alike() {
    let stored = moon();
    for (stored, user, password) in [
        (Some(&stored), "moon", "runner"),
        (None, "sun", "walker"),
        (None, "moon", "walker"),
    ] {
        let client = client(user, password);
        let (challenge, server) = challenge(stored, &client, 2);
        let (proof, _) = client.respond(&challenge).unwrap();
        assert_eq!(server.verify(&proof), Err(AuthError::Refused));
    }
}

#[test]
fn an_unknown_user_is_challenged_like_a_known_one() {
    let (known, _) = challenge(Some(&moon()), &client("moon", "x"), 2);
    let (unknown, _) = challenge(None, &client("moon", "x"), 2);
    assert_eq!(known, unknown);

    let again = challenge(None, &client("sun", "x"), 2).0;
    assert_eq!(
        again,
        challenge(None, &client("sun", "x"), 2).0,
        "the salt of a name must not change"
    );
    assert_ne!(again.salt, unknown.salt, "names must not share a salt");
    assert_eq!(again.salt.len(), known.salt.len());
}

#[test]
fn a_replayed_login_is_refused() {
    let stored = moon();
    let first = client("moon", "walker");
    let (first_challenge, first_server) = challenge(Some(&stored), &first, 2);
    let (proof, _) = first.respond(&first_challenge).unwrap();
    assert!(first_server.verify(&proof).is_ok());

    // The thief repeats both of the client's messages; the server's nonce is new.
    let (_, second_server) = challenge(Some(&stored), &client("moon", "walker"), 3);
    assert_eq!(second_server.verify(&proof), Err(AuthError::Refused));
}

#[test]
fn the_client_refuses_a_server_that_does_not_know_the_user() {
    let stored = moon();
    let client = client("moon", "walker");
    let (challenge, server) = challenge(Some(&stored), &client, 2);
    let (proof, check) = client.respond(&challenge).unwrap();
    let mut signature = server.verify(&proof).unwrap();
    signature[31] ^= 1;
    assert_eq!(check.verify(&signature), Err(AuthError::ServerNotProven));
}

#[test]
fn the_client_refuses_a_challenge_that_is_not_for_it() {
    let (challenge, _) = challenge(Some(&moon()), &client("moon", "walker"), 2);
    let respond = |change: &dyn Fn(&mut Challenge)| {
        let mut changed = challenge.clone();
        change(&mut changed);
        client("moon", "walker").respond(&changed).map(|_| ())
    };
    let set_nonce = |nonce: String| {
        move |changed: &mut Challenge| changed.nonce = nonce.clone().try_into().unwrap()
    };
    let own = client("moon", "walker").nonce().to_string();

    assert_eq!(respond(&|_| ()), Ok(()));
    assert_eq!(
        respond(&set_nonce("B".repeat(48))),
        Err(AuthError::NonceMismatch)
    );
    assert_eq!(
        respond(&set_nonce(own.clone())),
        Err(AuthError::Nonce),
        "the server must add its own"
    );
    assert_eq!(
        respond(&set_nonce(format!("{own}short"))),
        Err(AuthError::Nonce)
    );
    assert_eq!(
        respond(&set_nonce(format!("{own}{}", "a,".repeat(12)))),
        Err(AuthError::Nonce)
    );
}

#[test]
fn the_client_neither_weakens_its_key_nor_burns_its_processor() {
    let (challenge, _) = challenge(Some(&moon()), &client("moon", "walker"), 2);
    for asked in [0, 1, MIN_ITERATIONS - 1, MAX_ITERATIONS + 1, u32::MAX] {
        let hostile = Challenge {
            iterations: asked,
            ..challenge.clone()
        };
        let refused = client("moon", "walker").respond(&hostile).map(|_| ());
        assert_eq!(refused, Err(AuthError::Iterations { asked }));
    }
}

#[test]
fn the_server_refuses_a_malformed_nonce() {
    for malformed in [
        "",
        "tooshort",
        "with,comma,with,comma",
        "with space with space",
        "with\u{e9}accents-and-more",
    ] {
        let malformed = Nonce::try_from(malformed).unwrap();
        let refused =
            ServerExchange::challenge(None, &decoys(), "moon", &malformed, &nonce([2; 18]))
                .map(|_| ());
        assert_eq!(refused, Err(AuthError::Nonce));
    }
}

#[test]
fn an_empty_password_never_means_open() {
    assert_eq!(
        Credentials::new("moon", "").map(|_| ()),
        Err(AuthError::EmptyPassword)
    );
    let stored = StoredUser::derive(&"".into(), decoys().salt("moon"), DEFAULT_ITERATIONS);
    assert_eq!(stored.map(|_| ()), Err(AuthError::EmptyPassword));
    for name in ["", "mo\non", &"m".repeat(129)] {
        assert_eq!(
            Credentials::new(name, "walker").map(|_| ()),
            Err(AuthError::UserName)
        );
    }
}

#[test]
fn nothing_secret_is_printed() {
    let client = client("moon", "walker");
    let (challenge, server) = challenge(Some(&moon()), &client, 2);
    let mut printed = format!("{:?} {:?} {server:?} {client:?}", decoys(), moon());
    let (_, check) = client.respond(&challenge).unwrap();
    printed.push_str(&format!("{check:?}"));
    assert!(!printed.contains("walker"), "{printed}");
    assert!(
        !printed.contains("Key([") && !printed.contains("7, 7"),
        "{printed}"
    );
    assert_eq!(printed.matches("[REDACTED").count(), 8, "{printed}");
}
