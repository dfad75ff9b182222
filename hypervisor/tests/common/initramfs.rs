//! Archives for guests, in the newc format of cpio (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
//! Written here, without any process: a nested host is slow at starting them.

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive in the making.
#[derive(Default)]
pub struct Initramfs(Vec<u8>);

impl Initramfs {
    /// Busybox, with all that it can do in `/bin`, `/proc`, `/sys` and `/dev` mounted, and a shell that runs `script`.
    pub fn busybox(script: &str) -> Vec<u8> {
        let busybox = std::fs::read("/bin/busybox").expect("Debian's busybox-static is installed");
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\n\
             mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n{script}\n"
        );
        let mut archive = Self::default();
        for directory in ["bin", "dev", "proc", "sys", "tmp", "mnt"] {
            archive.member(directory, DIRECTORY, (0, 0), &[]);
        }
        // Init's own output, before it has a devtmpfs.
        archive.member("dev/console", CHARACTER_DEVICE, (5, 1), &[]);
        archive.member("bin/busybox", PROGRAM, (0, 0), &busybox);
        archive.member("init", PROGRAM, (0, 0), init.as_bytes());
        archive.end()
    }

    /// The test's own program as `/init`, and nothing else.
    pub fn this_program() -> Vec<u8> {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut archive = Self::default();
        archive.member("init", PROGRAM, (0, 0), &program);
        archive.end()
    }

    fn member(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let (length, name_size) = (content.len() as u32, name.len() as u32 + 1);
        let links = 1;
        let Self(archive) = self;
        archive.extend(b"070701");
        for field in [
            0, mode, 0, 0, links, 0, length, 0, 0, device.0, device.1, name_size, 0,
        ] {
            archive.extend(format!("{field:08x}").bytes());
        }
        archive.extend(name.bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(content);
        archive.resize(archive.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.member("TRAILER!!!", 0, (0, 0), &[]);
        self.0
    }
}
