//! Playing bundles in a sandbox of cube. The client and the daemon are left out, since each bundle would
//! take several runs of them and of the shim, and with them ten times as long.

use std::fs;
use std::path::Path;

use cube_tests::*;

use crate::bundle::Case;
use crate::lane::Outcome;

impl From<Failure> for Outcome {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(message) => Self::Refused(message),
            Failure::Silence(why) => Self::Ran(124, why),
        }
    }
}

/// Plays a bundle.
pub fn play(sandbox: &Sandbox, case: &Case, bundle: &Path, id: &str) -> Outcome {
    let output = bundle.join("output");
    let played = if case.exec {
        play_exec(sandbox, case, bundle, id, &output)
    } else {
        play_init(sandbox, bundle, id, &output)
    };
    match played {
        Ok(status) => Outcome::Ran(status, read(&output)),
        Err(Failure::Silence(why)) => Outcome::Ran(124, format!("{}{why}", read(&output))),
        Err(refused) => refused.into(),
    }
}

fn play_init(sandbox: &Sandbox, bundle: &Path, id: &str, output: &Path) -> Answer<i32> {
    let streams = Streams {
        stdout: to_file(output),
        ..Streams::default()
    };
    sandbox.create(bundle, id, &streams)?;
    let ended = sandbox.begin(id, "").and_then(|()| sandbox.end(id, ""));
    if ended.is_err() {
        sandbox.remove(id);
    }
    ended
}

fn play_exec(
    sandbox: &Sandbox,
    case: &Case,
    bundle: &Path,
    id: &str,
    output: &Path,
) -> Answer<i32> {
    let streams = Streams {
        terminal: case.has_terminal(),
        ..Streams::default()
    };
    sandbox.launch(bundle, id, &streams)?;
    let play = || -> Answer<i32> {
        if let Some(update) = &case.update {
            sandbox.update(id, update.to_string())?;
        }
        let process = process_of(bundle, &case.script());
        sandbox.add_exec(id, "probe", process, &to_file(output))?;
        let ended = sandbox
            .begin(id, "probe")
            .and_then(|()| sandbox.end(id, "probe"));
        if ended.is_err() {
            let _ = sandbox.delete(id, "probe");
        }
        ended
    };
    let played = play();
    sandbox.remove(id);
    played
}

fn to_file(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn read(output: &Path) -> String {
    String::from_utf8_lossy(&fs::read(output).unwrap_or_default()).into_owned()
}

/// The process that clients start beside the one of a bundle: like it, with other arguments.
fn process_of(bundle: &Path, script: &str) -> String {
    let config = fs::read(bundle.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let process = &mut config["process"];
    process["args"] = serde_json::json!(["sh", "-c", script]);
    process["terminal"] = serde_json::json!(false);
    process.to_string()
}
