//! A terminal with a command in it, as a user has it, and what the user sees and types.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use crate::Ended;

/// Nobody waits longer for something to be seen.
const LIMIT: Duration = Duration::from_secs(300);

/// The terminal, and the command.
pub struct Terminal {
    ours: File,
    client: Child,
    /// What was printed and not waited for yet.
    seen: Vec<u8>,
}

impl Terminal {
    /// Runs a `ctr` command line in a new terminal of this size.
    pub fn of(client: &Command, rows: u16, columns: u16) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let size = size(rows, columns);
        // SAFETY: the pointers are to two descriptors and a size that outlive the call; null stands for the defaults.
        let made = unsafe {
            libc::openpty(
                &mut ours,
                &mut theirs,
                std::ptr::null_mut(),
                std::ptr::null(),
                &size,
            )
        };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        // SAFETY: both descriptors were just made and have no other owner.
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        hand_on_as_it_is(&theirs);

        let mut command = Command::new(client.get_program());
        // timeout(1) must leave the client in the terminal's foreground.
        command.arg("--foreground").args(client.get_args());
        let their = || theirs.try_clone().unwrap();
        command.stdin(their()).stdout(their()).stderr(their());
        // SAFETY: both calls are safe between fork and exec and take numbers.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        Self {
            ours,
            client: command.spawn().unwrap(),
            seen: Vec::new(),
        }
    }

    /// Changes the window's size.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = size(rows, columns);
        // SAFETY: the pointer is to a size that outlives the call.
        let set = unsafe { libc::ioctl(self.ours.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }

    /// Types.
    pub fn press(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `text` is seen, behind what was waited for before.
    pub fn wait_for(&mut self, text: &str) {
        loop {
            let at = self
                .seen
                .windows(text.len())
                .position(|w| w == text.as_bytes());
            if let Some(at) = at {
                self.seen.drain(..at + text.len());
                return;
            }
            assert!(self.read(), "{text:?} is not seen: {}", self.text());
        }
    }

    /// Waits for the command's end: its status, and what was not waited for yet.
    pub fn end(mut self) -> Ended {
        while self.read() {}
        Ended {
            status: self.client.wait().unwrap().code().unwrap_or(-1),
            stdout: std::mem::take(&mut self.seen),
            stderr: String::new(),
        }
    }

    /// Reads some more; whether there is any.
    fn read(&mut self) -> bool {
        let mut event = libc::pollfd {
            fd: self.ours.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer is to one pollfd that outlives the call.
        let ready = unsafe { libc::poll(&mut event, 1, LIMIT.as_millis() as i32) };
        assert_eq!(ready, 1, "nothing comes behind: {}", self.text());
        let mut buffer = [0; 1 << 16];
        match self.ours.read(&mut buffer) {
            // Nobody has the other side open any more.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => false,
            read => {
                let n = read.unwrap();
                self.seen.extend_from_slice(&buffer[..n]);
                n > 0
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // As for somebody who closes the window.
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

fn size(rows: u16, columns: u16) -> libc::winsize {
    libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// Makes the terminal neither echo nor translate anything: the container's own does.
fn hand_on_as_it_is(terminal: &OwnedFd) {
    let fd = terminal.as_raw_fd();
    let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
    // SAFETY: tcgetattr fills the settings that its pointer is to, if it answers 0, and the pointer's outlive all calls.
    let set = unsafe {
        let got = libc::tcgetattr(fd, settings.as_mut_ptr());
        assert_eq!(got, 0, "{}", io::Error::last_os_error());
        libc::cfmakeraw(settings.as_mut_ptr());
        // The client switches the translation of output on again, which is none with this.
        (*settings.as_mut_ptr()).c_oflag = 0;
        libc::tcsetattr(fd, libc::TCSANOW, settings.as_ptr())
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}
