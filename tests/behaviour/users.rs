//! Users of containers, as `ctr run --user` names them. The client of containerd 1.6 has no such option.

use cube_tests::*;

#[test]
fn a_container_runs_as_the_numbers_that_were_asked_for() {
    let text = Container::new()
        .option("--user", "33:44")
        .sh("id -u; id -g; touch /tmp/mine && stat -c %u:%g /tmp/mine")
        .success();
    assert_eq!(text, "33\n44\n33:44\n");
}

#[test]
fn a_user_is_found_by_name_with_its_groups() {
    let text = Container::new()
        .option("--user", "www-data")
        .run(&["id"])
        .success();
    assert!(
        text.starts_with("uid=33(www-data) gid=33(www-data)"),
        "{text}"
    );
}

#[test]
fn an_unknown_user_is_named_and_nothing_is_left() {
    let container = Container::new().option("--user", "nobodyknows");
    let ended = container.run(&["true"]);
    assert_ne!(ended.status, 0);
    // The client looks it up in the image; these are its words.
    assert!(ended.stderr.contains("no users found"), "{}", ended.stderr);
    try_ctr(&["container", "delete", &container.id]);
    assert_no_traces_of(&container.id);
}
