//! newuidmap(1) and newgidmap(1), for libcontainer: a user namespace with more than one range of users or groups
//! it has mapped by these programs, which it looks for on PATH. A guest has no programs but the agent, and that
//! may write a map itself, so here the agent's binary answers to their names.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::ExitCode;

/// The programs' names, and which map in /proc/PID each writes.
const PROGRAMS: [(&str, &str); 2] = [("newuidmap", "uid_map"), ("newgidmap", "gid_map")];

/// Why a map could not be written.
#[derive(Debug, thiserror::Error)]
pub enum IdMapError {
    /// Not a process id followed by ranges of three numbers.
    #[error("Expected PID INSIDE OUTSIDE COUNT [INSIDE OUTSIDE COUNT …], not {0:?}")]
    Arguments(Vec<String>),
    /// The kernel does not take it.
    #[error("Cannot write {map:?} to /proc/{pid}/{file}")]
    Write {
        /// The process.
        pid: u32,
        /// The file.
        file: &'static str,
        /// The map.
        map: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
}

/// Makes the programs in a directory that is to be on PATH.
pub fn provide(directory: &Path) -> io::Result<()> {
    for (name, _) in PROGRAMS {
        symlink("/proc/self/exe", directory.join(name))?;
    }
    Ok(())
}

/// The map in /proc/PID that a program of this name (its zeroth argument) writes.
pub fn file_of(program: &str) -> Option<&'static str> {
    let name = program.rsplit('/').next()?;
    PROGRAMS
        .iter()
        .find(|(program, _)| *program == name)
        .map(|(_, file)| *file)
}

/// The programs' main.
pub fn main(file: &'static str, arguments: impl Iterator<Item = String>) -> ExitCode {
    match write(file, arguments.collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", crate::error::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn write(file: &'static str, arguments: Vec<String>) -> Result<(), IdMapError> {
    let Some((pid, map)) = parse(&arguments) else {
        return Err(IdMapError::Arguments(arguments));
    };
    fs::write(format!("/proc/{pid}/{file}"), &map).map_err(|source| IdMapError::Write {
        pid,
        file,
        map,
        source,
    })
}

/// The process and its map as the kernel wants it (user_namespaces(7)): a range a line, in one write.
fn parse(arguments: &[String]) -> Option<(u32, String)> {
    let numbers: Vec<u32> = arguments
        .iter()
        .map(|argument| argument.parse().ok())
        .collect::<Option<_>>()?;
    let (pid, ranges) = numbers.split_first()?;
    let (ranges, rest) = ranges.as_chunks::<3>();
    if ranges.is_empty() || !rest.is_empty() {
        return None;
    }
    let map = ranges
        .iter()
        .map(|[inside, outside, count]| format!("{inside} {outside} {count}\n"))
        .collect();
    Some((*pid, map))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<(u32, String)> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&arguments)
    }

    #[test]
    fn each_range_is_a_line_of_the_map() {
        assert_eq!(
            parsed("7 0 0 20 20 2000 65535"),
            Some((7, "0 0 20\n20 2000 65535\n".into()))
        );
    }

    #[test]
    fn arguments_that_are_no_ranges_are_refused() {
        for line in ["", "7", "7 0 0", "7 0 0 1 2", "x 0 0 1", "7 0 -1 1"] {
            assert_eq!(parsed(line), None, "{line:?}");
        }
    }

    #[test]
    fn the_programs_are_known_by_their_last_name() {
        assert_eq!(file_of("/run/cube/containers/c/newgidmap"), Some("gid_map"));
        assert_eq!(file_of("newuidmap"), Some("uid_map"));
        assert_eq!(file_of("/init"), None);
    }
}
