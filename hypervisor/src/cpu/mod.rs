//! What a vCPU is when it starts, and what a snapshot keeps of it.

pub mod cpuid;
pub mod registers;
pub mod state;
