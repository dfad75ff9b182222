//! The OCI runtime specification, field by field: the same bundles run with cube and with runc, and what a container sees is
//! compared. A bundle is a small one with a change; together the changes have every field of `oci/fields`.
//!
//! `CUBE_TEST_CASE` picks the bundles that have one of its parts (`a|b`) in their name, and tells of each what became of it.

#[path = "oci/bundle.rs"]
mod bundle;
#[path = "oci/cases/mod.rs"]
mod cases;
#[path = "oci/lane.rs"]
mod lane;
#[path = "oci/pairs.rs"]
mod pairs;
#[path = "oci/sandbox.rs"]
mod sandbox;

use std::io::Write;
use std::time::Instant;

use bundle::{Case, Expect};
use lane::{Lane, Outcome};

/// The fields of the specification.
fn schema() -> Vec<&'static str> {
    let fields = include_str!("oci/fields").lines();
    fields.filter(|line| !line.starts_with('#')).collect()
}

#[test]
fn every_field_of_the_specification_has_a_bundle() {
    let used: Vec<Vec<String>> = cases::all()
        .iter()
        .flat_map(|case| bundle::fields(&case.change))
        .collect();
    let missing: Vec<_> = schema()
        .into_iter()
        .filter(|field| !used.iter().any(|path| bundle::is_at(path, field)))
        .collect();
    assert!(missing.is_empty(), "no bundle has {missing:#?}");
}

#[test]
fn fields_that_interact_have_a_bundle_together() {
    let (pairs, schema) = (pairs::all(), schema());
    let bundles: Vec<_> = cases::all().iter().map(pairs::Bundle::from).collect();
    let unknown: Vec<_> = pairs.iter().flat_map(|p| p.unknown(&schema)).collect();
    assert!(unknown.is_empty(), "no fields: {unknown:#?}");
    let missing: Vec<_> = pairs
        .iter()
        .filter(|pair| !bundles.iter().any(|bundle| pair.is_in(bundle)))
        .map(ToString::to_string)
        .collect();
    assert!(
        missing.is_empty(),
        "{} of {} pairs have no bundle: {missing:#?}",
        missing.len(),
        pairs.len()
    );
}

#[test]
fn the_documentation_counts_them() {
    let (bundles, fields, pairs) = (cases::all().len(), schema().len(), pairs::all().len());
    let text = include_str!("../../docs/OCI.md");
    for told in [
        format!("plays {bundles} bundles"),
        format!("the {fields} fields"),
        format!("the {pairs} groups of fields"),
    ] {
        assert!(text.contains(&told), "docs/OCI.md does not say {told:?}");
    }
}

#[test]
fn processes_are_what_the_bundle_says() {
    compare("process", cases::process::cases());
}

#[test]
fn mounts_are_what_the_bundle_says() {
    compare("mounts", cases::mounts::cases());
}

#[test]
fn cgroups_are_what_the_bundle_says() {
    compare("cgroups", cases::cgroups::cases());
}

#[test]
fn seccomp_filters_are_what_the_bundle_says() {
    compare("seccomp", cases::seccomp::cases());
}

#[test]
fn namespaces_devices_and_hooks_are_what_the_bundle_says() {
    compare("linux", cases::linux::cases());
}

#[test]
fn fields_that_interact_do_what_the_bundle_says() {
    compare("pairs", cases::pairs::cases());
}

/// Goes past the test harness, which keeps what a test prints to itself unless it fails.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Runs the bundles with both runtimes at the same time; those that cube alone refuses, with cube.
fn compare(topic: &str, mut cases: Vec<Case>) {
    if let Ok(wanted) = std::env::var("CUBE_TEST_CASE") {
        let is_wanted = |case: &Case| wanted.split('|').any(|part| case.name.contains(part));
        let some = cases::all().iter().any(is_wanted);
        assert!(some, "no bundle has {wanted:?} in its name");
        cases.retain(is_wanted);
        // It is in another topic.
        if cases.is_empty() {
            return;
        }
    }
    let begin = Instant::now();
    // The first ones have both.
    cases.sort_by_key(|case| matches!(case.expect, Expect::Refused(_)));
    let both = cases.partition_point(|case| !matches!(case.expect, Expect::Refused(_)));
    let (cube, runc) = std::thread::scope(|scope| {
        let cube = scope.spawn(|| Lane::cube().run_all(&cases));
        let runc = scope.spawn(|| Lane::runc().run_all(&cases[..both]));
        (cube.join().unwrap(), runc.join().unwrap())
    });
    let runc = runc
        .into_iter()
        .map(Some)
        .chain(std::iter::repeat_with(|| None));
    let count = |kind: fn(&Expect) -> bool| cases.iter().filter(|c| kind(&c.expect)).count();
    tell(&format!(
        "oci: {topic}: {} bundles in {} s: {} to be the same, {} refused, {} otherwise",
        cases.len(),
        begin.elapsed().as_secs(),
        count(|e| *e == Expect::Same),
        count(|e| matches!(e, Expect::Invalid(_) | Expect::Refused(_))),
        count(|e| matches!(e, Expect::Otherwise(..))),
    ));
    let faults: Vec<_> = cases
        .iter()
        .zip(cube.iter().zip(runc))
        .filter_map(|(case, (cube, runc))| fault(case, cube, runc.as_ref()))
        .collect();
    assert!(
        faults.is_empty(),
        "{} of {} bundles:\n{}",
        faults.len(),
        cases.len(),
        faults.join("\n")
    );
}

/// What is wrong with what the two have done.
fn fault(case: &Case, cube: &Outcome, runc: Option<&Outcome>) -> Option<String> {
    let told = |what: &str| {
        let runc = runc.map_or_else(String::new, |runc| format!("\nrunc: {runc}"));
        Some(format!("--- {}: {what}\ncube: {cube}{runc}", case.name))
    };
    match (&case.expect, cube) {
        (Expect::Same, Outcome::Refused(_)) => told("is refused"),
        // The same of both would prove nothing.
        (Expect::Same, Outcome::Ran(124, _)) => told("does not end"),
        (Expect::Same, Outcome::Ran(_, output)) if output.contains(": not found") => {
            told("has a probe that misses a program")
        }
        (Expect::Same, _) if Some(cube) != runc => told("differs"),
        (Expect::Same, _) => None,
        (Expect::Invalid(_), _) if !matches!(runc, Some(Outcome::Refused(_))) => {
            told("is not refused by runc")
        }
        (Expect::Invalid(words) | Expect::Refused(words), Outcome::Refused(message))
            if message.contains(words) =>
        {
            None
        }
        (Expect::Invalid(words) | Expect::Refused(words), _) => {
            told(&format!("is to be refused by {words:?}"))
        }
        (Expect::Otherwise(..), cube) if Some(cube) == runc => told("is the same by now"),
        (Expect::Otherwise(status, output), Outcome::Ran(s, o))
            if (s, o.trim()) == (status, output.trim()) =>
        {
            None
        }
        (Expect::Otherwise(_, output), _) => told(&format!("is to be {output:?}")),
    }
}
