//! The machine and what it shares.

use std::env;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::guest::HOST_LINES;

pub struct Vm {
    child: Child,
    orders: UnixStream,
    lines: BufReader<UnixStream>,
    _rootfs: Mount,
    dir: tempfile::TempDir,
}

impl Vm {
    /// A machine that shares `shared` in a directory of its own: an overlay at `rootfs/c1`, and `volumes/v`.
    pub fn start(kernel: &Path) -> Self {
        let base = env::var_os("CUBE_TEST_DIR").map_or_else(env::temp_dir, PathBuf::from);
        fs::create_dir_all(&base).unwrap();
        let dir = tempfile::tempdir_in(base).unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in [
            "lower/etc",
            "upper",
            "work",
            "shared/rootfs/c1",
            "shared/volumes/v",
        ] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("lower/etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
        let rootfs = Mount::overlay(dir.path(), &at("shared/rootfs/c1"));
        let initramfs = at("initramfs");
        write_initramfs(&initramfs);
        let config = serde_json::json!({
            "kernel": kernel,
            "initramfs": initramfs,
            "cmdline": "quiet panic=-1 reboot=k",
            "vcpus": 1,
            "memory_mib": 768,
            "shares": [{
                "tag": "share",
                "path": at("shared"),
                "guest_owned": ["rootfs"],
            }],
            "vsock": { "path": at("v") },
            "console": "log",
        });
        fs::write(at("vm.json"), config.to_string()).unwrap();
        let service = UnixListener::bind(at(&format!("v_{HOST_LINES}"))).unwrap();
        let built = env!("CARGO_BIN_EXE_cube-hypervisor").into();
        let program = env::var_os("CUBE_HYPERVISOR").unwrap_or(built);
        let child = Command::new(program)
            .arg("--config")
            .arg(at("vm.json"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let orders = accept_unless_it_ends(&service, child.id());
        let mut vm = Self {
            child,
            lines: BufReader::new(orders.try_clone().unwrap()),
            orders,
            _rootfs: rootfs,
            dir,
        };
        assert_eq!(vm.line(), "ready");
        vm
    }

    /// The directory of all its files.
    pub fn directory(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// The directory that it shares.
    pub fn shared(&self) -> PathBuf {
        self.dir.path().join("shared")
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end_matches('\n').to_owned()
    }

    /// Has the guest do `what` on `path` and returns its answer.
    pub fn try_ask(&mut self, what: &str, path: &str) -> Result<String, String> {
        writeln!(self.orders, "{what} {path}").unwrap();
        let line = self.line();
        line.strip_prefix("ok ")
            .map(str::to_owned)
            .ok_or_else(|| line.clone())
    }

    /// As [`try_ask`](Self::try_ask), of what must not fail.
    pub fn ask(&mut self, what: &str, path: &str) -> String {
        self.try_ask(what, path)
            .unwrap_or_else(|error| panic!("{what} {path}: {error}"))
    }

    /// How many descriptors the hypervisor has open.
    pub fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.child.id());
        fs::read_dir(path).unwrap().count()
    }

    /// The memory that the hypervisor uses for itself, in KiB: what is anonymous and not the guest's.
    pub fn own_memory(&self) -> u64 {
        let maps = fs::read_to_string(format!("/proc/{}/smaps", self.child.id())).unwrap();
        let mut sum = 0;
        let mut guest = false;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("Size:"), Some(size)) => guest = size.parse::<u64>().unwrap() > 256 << 10,
                (Some("Pss:"), Some(size)) if !guest => sum += size.parse::<u64>().unwrap(),
                _ => {}
            }
        }
        sum
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mount, until dropped.
pub struct Mount(CString);

impl Mount {
    fn new(source: &str, target: &Path, kind: &str, flags: u64, data: &str) -> Self {
        let text = |text: &str| CString::new(text).unwrap();
        let point = text(target.to_str().unwrap());
        // SAFETY: all are valid strings.
        let done = unsafe {
            libc::mount(
                text(source).as_ptr(),
                point.as_ptr(),
                text(kind).as_ptr(),
                flags,
                text(data).as_ptr().cast(),
            )
        };
        assert_eq!(done, 0, "{target:?}: {}", io::Error::last_os_error());
        Self(point)
    }

    /// An overlay of the layers in `directory`.
    pub fn overlay(directory: &Path, target: &Path) -> Self {
        let at = |name: &str| directory.join(name).display().to_string();
        let data = format!(
            "lowerdir={},upperdir={},workdir={}",
            at("lower"),
            at("upper"),
            at("work")
        );
        Self::new("overlay", target, "overlay", 0, &data)
    }

    /// An empty file system.
    pub fn tmpfs(target: &Path) -> Self {
        Self::new("tmpfs", target, "tmpfs", 0, "")
    }

    /// `source` at `target`.
    pub fn bind(source: &Path, target: &Path) -> Self {
        Self::new(source.to_str().unwrap(), target, "", libc::MS_BIND, "")
    }

    /// Unmounts, which fails while it is in use.
    pub fn end(self) -> io::Result<()> {
        // SAFETY: a valid string.
        match unsafe { libc::umount2(self.0.as_ptr(), 0) } {
            0 => {
                std::mem::forget(self);
                Ok(())
            }
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // SAFETY: a valid string.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

fn accept_unless_it_ends(service: &UnixListener, child: u32) -> UnixStream {
    // SAFETY: no pointers are passed.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) } as i32;
    let watch = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [watch(service.as_raw_fd()), watch(pidfd)];
    // SAFETY: the array has two elements.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
    assert!(
        ready > 0 && fds[1].revents == 0,
        "the machine ended before its guest was there"
    );
    // SAFETY: the descriptor is ours alone.
    unsafe { libc::close(pidfd) };
    service.accept().unwrap().0
}

/// This program as `/init`, in a newc archive (Linux, `Documentation/driver-api/early-userspace/buffer-format.rst`).
fn write_initramfs(path: &Path) {
    let program = fs::read(env::current_exe().unwrap()).unwrap();
    let mut file = File::create(path).unwrap();
    for (name, mode, data) in [("init", 0o100_755, &program[..]), ("TRAILER!!!", 0, &[])] {
        let length = data.len();
        let fields = [1, mode, 0, 0, 1, 0, length, 0, 0, 0, 0, name.len() + 1, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        let name_end = (header.len() + name.len() + 1).next_multiple_of(4);
        let mut entry = [header.as_bytes(), name.as_bytes()].concat();
        entry.resize(name_end, 0);
        entry.extend_from_slice(data);
        entry.resize(entry.len().next_multiple_of(4), 0);
        file.write_all(&entry).unwrap();
    }
}
