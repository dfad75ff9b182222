//! Turning into the user's program: the last steps inside the container, common to a container's
//! init (libcontainer calls them) and to an exec.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use libcontainer::container::State;
use libcontainer::hooks::run_hooks;
use libcontainer::workload::{
    Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError,
};
use nix::errno::Errno;
use oci_spec::runtime::{Hook, Process, Spec};

use super::child::{ChildError, Control};

/// A program that was found, with its arguments and environment.
#[derive(Debug)]
pub struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Program {
    /// Looks the program up as the process's user, inside its root and working directory.
    pub fn find(process: &Process) -> Result<Self, ChildError> {
        let arguments = process.args().as_deref().unwrap_or_default();
        let mut environment = last_of_each(process.env().as_deref().unwrap_or_default());
        let path = environment
            .iter()
            .find_map(|variable| variable.strip_prefix("PATH="))
            .map(str::to_owned);
        let name = arguments.first().map(String::as_str).unwrap_or_default();
        let path = look_up(name, path.as_deref())
            .map_err(|e| ChildError::Invalid(format!("exec: {name:?}: {e}")))?;
        let home = |variable: &String| variable.len() > 5 && variable.starts_with("HOME=");
        if !environment.iter().any(home) {
            environment.retain(|variable| !variable.starts_with("HOME="));
            environment.push(format!("HOME={}", home_of(process.user().uid())));
        }
        Ok(Self {
            path: c_string(path.as_os_str().as_bytes())?,
            arguments: c_strings(arguments)?,
            environment: c_strings(&environment)?,
        })
    }

    /// Becomes the program; returns only the reason why not.
    pub fn run(&self) -> Errno {
        match nix::unistd::execve(&self.path, &self.arguments, &self.environment) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    /// Its variables.
    fn environment(&self) -> HashMap<String, String> {
        let variables = self.environment.iter().map(|v| v.to_string_lossy());
        variables
            .filter_map(|v| v.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())))
            .collect()
    }

    /// The path of the program.
    pub fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }
}

fn c_strings(strings: &[String]) -> Result<Vec<CString>, ChildError> {
    strings.iter().map(|s| c_string(s.as_bytes())).collect()
}

fn c_string(bytes: &[u8]) -> Result<CString, ChildError> {
    CString::new(bytes).map_err(|_| {
        ChildError::Invalid(format!(
            "an argument or a variable has a NUL byte: {:?}",
            String::from_utf8_lossy(bytes)
        ))
    })
}

/// Of several values of a variable the last counts; the order stays.
fn last_of_each(environment: &[String]) -> Vec<String> {
    let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
    let last: HashMap<String, usize> = environment
        .iter()
        .enumerate()
        .map(|(at, variable)| (name(variable), at))
        .collect();
    environment
        .iter()
        .enumerate()
        .filter(|(at, variable)| last.get(&name(variable)) == Some(at))
        .map(|(_, variable)| variable.clone())
        .collect()
}

/// Finds a program as a shell does; the errors are the words of runc (Go's os/exec).
fn look_up(name: &str, path: Option<&str>) -> Result<PathBuf, String> {
    const NOT_FOUND: &str = "executable file not found in $PATH";
    if name.contains('/') {
        return executable(Path::new(name)).map(|()| name.into());
    }
    if name.is_empty() {
        return Err(NOT_FOUND.into());
    }
    path.unwrap_or_default()
        .split(':')
        // An empty or a relative element would find programs in the working directory.
        .filter(|directory| directory.starts_with('/'))
        .map(|directory| Path::new(directory).join(name))
        .find(|candidate| executable(candidate).is_ok())
        .ok_or_else(|| NOT_FOUND.into())
}

fn executable(path: &Path) -> Result<(), String> {
    let metadata =
        fs::metadata(path).map_err(|e| format!("stat {}: {}", path.display(), in_words(&e)))?;
    if metadata.is_dir() {
        return Err("is a directory".into());
    }
    nix::unistd::faccessat(
        None,
        path,
        nix::unistd::AccessFlags::X_OK,
        nix::fcntl::AtFlags::AT_EACCESS,
    )
    .map_err(|e| in_words(&e.into()))
}

/// The system's text for an error in small letters, as Go writes it.
pub fn in_words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw(number).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// The home directory in the container's /etc/passwd, or the root directory.
fn home_of(uid: u32) -> String {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    home_in(&passwd, uid).unwrap_or_else(|| "/".into())
}

/// passwd(5): name, password, UID, GID, comment, home, shell.
fn home_in(passwd: &str, uid: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        let same = fields.next()?.parse() == Ok(uid);
        let home = fields.nth(2)?;
        (same && !home.is_empty()).then(|| home.to_owned())
    })
}

/// Hooks that run just before the container's program. libcontainer (0.7) would not tell them the process id.
pub struct StartHooks {
    /// In their order.
    pub list: Vec<Hook>,
    /// What they are told of the container.
    pub state: State,
}

impl StartHooks {
    /// With the program's environment, unless they have their own.
    fn run(&self, program: &Program) -> Result<(), ExecutorError> {
        // As the container counts: 1, if it has a PID namespace of its own.
        let pid = Some(nix::unistd::getpid());
        let environment = program.environment();
        run_hooks(
            Some(&self.list),
            Some(&self.state),
            None,
            pid,
            Some(&environment),
        )
        .map_err(|e| ExecutorError::Other(format!("hooks.startContainer: {e}")))
    }
}

/// What libcontainer calls in a container's init.
#[derive(Clone)]
pub struct InitExecutor {
    /// The process object as it was asked for.
    process: Rc<Process>,
    hooks: Rc<StartHooks>,
    control: Control,
    program: Rc<RefCell<Option<Program>>>,
}

impl InitExecutor {
    /// For the container whose process this is.
    pub fn new(process: Process, hooks: StartHooks, control: Control) -> Self {
        Self {
            process: Rc::new(process),
            hooks: Rc::new(hooks),
            control,
            program: Rc::default(),
        }
    }
}

impl Executor for InitExecutor {
    /// Called as the process's user, before the container counts as created.
    fn validate(&self, _spec: &Spec) -> Result<(), ExecutorValidationError> {
        let found = Program::find(&self.process).and_then(|program| {
            if self.process.terminal() == Some(true) {
                // The agent gives the terminal its size and its owner first.
                self.control
                    .wait()
                    .map_err(|e| ChildError::failed("cannot wait for the terminal", e))?;
            }
            Ok(program)
        });
        match found {
            Ok(program) => {
                self.program.replace(Some(program));
                Ok(())
            }
            Err(error) => {
                let text = error.to_string();
                self.control.failed(&super::create::during_init(error));
                Err(ExecutorValidationError::ArgValidationError(text))
            }
        }
    }

    /// The environment goes to execve, not through this process's own.
    fn setup_envs(&self, _envs: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }

    /// Called when the container is started. Nobody can be told any more but the user.
    fn exec(&self, _spec: &Spec) -> Result<(), ExecutorError> {
        let program = self.program.borrow();
        let Some(program) = program.as_ref() else {
            return Err(ExecutorError::InvalidArg);
        };
        self.hooks.run(program)?;
        let error = program.run();
        eprintln!(
            "exec {}: {}",
            program.path(),
            in_words(&io::Error::from(error))
        );
        std::process::exit(255);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("a")).unwrap();
        fs::create_dir(path("b")).unwrap();
        fs::create_dir(path("a/tool")).unwrap();
        fs::write(path("a/plain"), "").unwrap();
        fs::write(path("b/tool"), "").unwrap();
        fs::set_permissions(path("b/tool"), PermissionsExt::from_mode(0o755)).unwrap();
        symlink("tool", path("b/link")).unwrap();
        symlink("nowhere", path("a/link")).unwrap();
        let search = format!("relative::{}:{}", path("a").display(), path("b").display());

        // Neither a directory nor a dangling link hides what comes later.
        assert_eq!(look_up("tool", Some(&search)), Ok(path("b/tool")));
        assert_eq!(look_up("link", Some(&search)), Ok(path("b/link")));
        assert_eq!(
            look_up("nosuch", Some(&search)).unwrap_err(),
            "executable file not found in $PATH"
        );
        assert_eq!(
            look_up("sh", None).unwrap_err(),
            "executable file not found in $PATH"
        );
        let text = |name: &str| look_up(path(name).to_str().unwrap(), None).unwrap_err();
        assert_eq!(text("a"), "is a directory");
        assert_eq!(text("a/plain"), "permission denied");
        assert_eq!(
            text("x"),
            format!("stat {}: no such file or directory", path("x").display())
        );
    }

    #[test]
    fn home_comes_from_passwd() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\nbad\nweb:x:33:33::/var/www:/bin/false\nn:x:7:7:::\n";
        assert_eq!(home_in(passwd, 0).as_deref(), Some("/root"));
        assert_eq!(home_in(passwd, 33).as_deref(), Some("/var/www"));
        assert_eq!(home_in(passwd, 7), None);
        assert_eq!(home_in(passwd, 5), None);
    }

    #[test]
    fn the_last_value_of_a_variable_counts() {
        let environment = ["A=1", "B=2", "A=3", "C=x=y"].map(String::from);
        assert_eq!(last_of_each(&environment), ["B=2", "A=3", "C=x=y"]);
    }
}
