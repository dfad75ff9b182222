//! The agent with real containers. With `CUBE_TEST_KVM=1`, as tests/run-all has it, it is PID 1 of a guest,
//! of the kernel that `CUBE_KERNEL` names on the hypervisor that `CUBE_HYPERVISOR` names. Without, it runs on
//! this machine: its service over Unix sockets, its helpers, cgroups, namespaces and streams are what they
//! are in a guest.
//!
//! Needs root. The agent collects every orphan, so it runs in a process of its own: this program once more.
//! `--measure` tells what things cost instead: on the counting clock (tests/rig/run --icount) in
//! instructions, with the agent that `CUBE_TEST_AGENT` names.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod guest;
mod isolation;
mod lifecycle;
mod memory;
mod orphans;
mod rig;
mod streams;

/// A list of tests: names and functions.
macro_rules! tests {
    ($($name:ident = $test:path,)*) => {
        [$((stringify!($name), |harness| harness.block($test)),)*]
    };
}

/// In a guest, or without KVM on this machine.
const TESTS: [rig::Test; 26] = tests![
    a_container_says_hello_and_exits_with_its_code = lifecycle::hello,
    signals_end_a_container_with_128_and_the_number = lifecycle::signals,
    a_missing_program_fails_in_create_in_runcs_words = lifecycle::missing_program,
    create_refuses_what_it_cannot_do = lifecycle::refused,
    hooks_of_the_containers_namespaces_run_there = lifecycle::hooks,
    identity_environment_and_limits_are_the_specs = isolation::identity,
    stdin_ends_by_shutdown_and_by_close_stdin = streams::stdin_ends,
    mebibytes_arrive_on_both_outputs_and_through_stdin = streams::big_streams,
    a_process_that_ignores_its_streams_does_no_harm = streams::careless_streams,
    an_exec_runs_in_the_container = isolation::exec,
    an_exec_with_a_background_child_ends_and_its_output_with_delete = streams::background,
    what_init_leaves_behind_ends_with_it = lifecycle::leftovers,
    an_execs_exit_comes_before_its_containers = lifecycle::exec_exit_first,
    a_container_takes_execs_before_its_start = lifecycle::exec_before_start,
    a_terminal_has_size_owner_and_job_control = streams::terminal,
    pause_stops_and_resume_goes_on = lifecycle::pause,
    processes_and_figures_are_those_of_the_container = lifecycle::figures,
    devices_are_filtered = isolation::devices,
    seccomp_filters_init_and_exec = isolation::seccomp,
    a_user_namespace_is_the_containers_and_its_execs = isolation::user_namespace,
    every_call_answers_wrong_names_and_states = lifecycle::wrong_calls,
    fifty_containers_at_once_leave_nothing = lifecycle::many,
    past_its_memory_limit_a_container_is_killed_and_that_is_told = memory::limit,
    kills_for_want_of_memory_are_told_while_the_container_lives = memory::survived,
    a_thousand_orphans_leave_no_zombie_and_steal_no_status = orphans::thousand,
    daemons_end_with_their_containers_init = orphans::daemons,
];

/// In a guest only.
const GUEST_TESTS: [rig::Test; 3] = tests![
    settings_that_cannot_be_made_are_refused_by_name = guest::bad_settings,
    nothing_of_all_containers_is_left = guest::nothing_left,
    // The last one: the machine ends with it.
    guest_wide_settings_take_effect_and_shutdown_resets = guest::settings,
];

fn main() -> std::process::ExitCode {
    if std::env::args().any(|argument| argument == "--measure") {
        return rig::run(&tests![what_things_cost = lifecycle::costs,], &[]);
    }
    rig::run(&TESTS, &GUEST_TESTS)
}
