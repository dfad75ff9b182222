//! Kernels of a few instructions.

/// Where the tests' kernels are loaded and entered.
const KERNEL_ADDRESS: u32 = 0x10_0000;

/// Machine code for 32-bit protected mode, as PVH starts it.
pub mod code {
    /// Resets the machine by the keyboard controller.
    pub const RESET: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64, 0xf4];
    /// An invalid instruction without an interrupt table: a triple fault.
    pub const TRIPLE_FAULT: &[u8] = &[0x0f, 0x0b];
    /// Jumps to itself.
    pub const SPIN: &[u8] = &[0xeb, 0xfe];

    /// Writes `text` to the serial port.
    pub fn print(text: &str) -> Vec<u8> {
        let mut code = vec![0xba, 0xf8, 0x03, 0, 0]; // mov edx, 0x3f8
        for byte in text.bytes() {
            code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
        }
        code
    }
}

/// An ELF image that runs `code`; with a PVH note if it is to be entered.
pub fn kernel(code: &[u8], pvh: bool) -> Vec<u8> {
    const HEADERS: usize = 64 + 2 * 56;
    const CODE: usize = 256;
    let mut elf = vec![0; CODE];
    elf[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    elf[16..20].copy_from_slice(&[2, 0, 62, 0]); // executable, x86-64
    put(&mut elf, 24, &u64::from(KERNEL_ADDRESS).to_le_bytes());
    put(&mut elf, 32, &64u64.to_le_bytes()); // program headers
    put(&mut elf, 54, &56u16.to_le_bytes());
    put(&mut elf, 56, &2u16.to_le_bytes());
    program_header(&mut elf, 64, 1, CODE, code.len());
    program_header(&mut elf, 120, 4, HEADERS, 20);
    let kind: u32 = if pvh { 18 } else { 1 };
    put(&mut elf, HEADERS, &4u32.to_le_bytes());
    put(&mut elf, HEADERS + 4, &4u32.to_le_bytes());
    put(&mut elf, HEADERS + 8, &kind.to_le_bytes());
    put(&mut elf, HEADERS + 12, b"Xen\0");
    put(&mut elf, HEADERS + 16, &KERNEL_ADDRESS.to_le_bytes());
    elf.extend_from_slice(code);
    elf
}

fn program_header(elf: &mut [u8], at: usize, kind: u32, offset: usize, size: usize) {
    put(elf, at, &kind.to_le_bytes());
    put(elf, at + 8, &(offset as u64).to_le_bytes());
    put(elf, at + 24, &u64::from(KERNEL_ADDRESS).to_le_bytes());
    put(elf, at + 32, &(size as u64).to_le_bytes());
    put(elf, at + 40, &(size as u64).to_le_bytes());
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}
