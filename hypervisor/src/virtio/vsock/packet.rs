//! The packet header (virtio 1.2, section 5.10.6, `struct virtio_vsock_hdr`).

/// Size of a header in bytes.
pub const HEADER_SIZE: usize = 44;

/// The host's context identifier (`VMADDR_CID_HOST`).
pub const HOST_CID: u32 = 2;

/// `VMADDR_PORT_ANY`: no connection has it.
pub const ANY_PORT: u32 = u32::MAX;

/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender takes no more data.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender has no more data.
pub const SHUTDOWN_SEND: u32 = 2;
/// Both directions.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// The operations, `VIRTIO_VSOCK_OP_*`.
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts one.
    pub const RESPONSE: u16 = 2;
    /// Ends or refuses one.
    pub const RST: u16 = 3;
    /// Ends a direction or both.
    pub const SHUTDOWN: u16 = 4;
    /// Carries data.
    pub const RW: u16 = 5;
    /// Tells how much the sender takes.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for a credit update.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// A packet header, copied out of guest memory once, or to be copied into it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Who sends.
    pub src_cid: u64,
    /// Who is meant.
    pub dst_cid: u64,
    /// The sender's port.
    pub src_port: u32,
    /// The receiver's port.
    pub dst_port: u32,
    /// Bytes of data behind the header.
    pub len: u32,
    /// The socket's type.
    pub socket_type: u16,
    /// The operation, one of [`op`].
    pub op: u16,
    /// Flags of a shutdown.
    pub flags: u32,
    /// The size of the sender's receive buffer for this connection.
    pub buf_alloc: u32,
    /// How many bytes the sender has taken out of that buffer since the connection began, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads the fields, all little-endian.
    pub fn from_bytes(bytes: &[u8; HEADER_SIZE]) -> Self {
        let mut fields = Fields(bytes);
        Self {
            src_cid: u64::from_le_bytes(fields.take()),
            dst_cid: u64::from_le_bytes(fields.take()),
            src_port: u32::from_le_bytes(fields.take()),
            dst_port: u32::from_le_bytes(fields.take()),
            len: u32::from_le_bytes(fields.take()),
            socket_type: u16::from_le_bytes(fields.take()),
            op: u16::from_le_bytes(fields.take()),
            flags: u32::from_le_bytes(fields.take()),
            buf_alloc: u32::from_le_bytes(fields.take()),
            fwd_cnt: u32::from_le_bytes(fields.take()),
        }
    }

    /// As it stands in memory.
    pub fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.socket_type.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The refusal of this packet, back to where it came from (Linux: `virtio_transport_reset_no_sock`).
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            socket_type: self.socket_type,
            op: op::RST,
            ..Self::default()
        }
    }
}

/// Cuts arrays off the front of a header.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((field, rest)) => {
                self.0 = rest;
                *field
            }
            None => [0; N],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fields_stand_where_the_specification_says() {
        let mut bytes = [0; HEADER_SIZE];
        for (index, byte) in (0..).zip(&mut bytes) {
            *byte = index;
        }
        let header = Header::from_bytes(&bytes);
        assert_eq!(header.src_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.dst_cid, 0x0f0e_0d0c_0b0a_0908);
        assert_eq!(header.src_port, 0x1312_1110);
        assert_eq!(header.dst_port, 0x1716_1514);
        assert_eq!(header.len, 0x1b1a_1918);
        assert_eq!(header.socket_type, 0x1d1c);
        assert_eq!(header.op, 0x1f1e);
        assert_eq!(header.flags, 0x2322_2120);
        assert_eq!(header.buf_alloc, 0x2726_2524);
        assert_eq!(header.fwd_cnt, 0x2b2a_2928);
    }

    #[test]
    fn a_refusal_goes_back_where_the_packet_came_from() {
        let packet = Header {
            src_cid: 3,
            dst_cid: 9,
            src_port: 4,
            dst_port: 5,
            len: 6,
            socket_type: 7,
            op: op::REQUEST,
            flags: 8,
            buf_alloc: 9,
            fwd_cnt: 10,
        };
        let reset = packet.reset();
        assert_eq!((reset.src_cid, reset.dst_cid), (9, 3));
        assert_eq!((reset.src_port, reset.dst_port), (5, 4));
        assert_eq!((reset.op, reset.socket_type, reset.len), (op::RST, 7, 0));
    }

    proptest! {
        #[test]
        fn every_header_survives_the_trip_through_memory(bytes: [u8; HEADER_SIZE - 12], tail: [u8; 12]) {
            let mut all = [0; HEADER_SIZE];
            all[..HEADER_SIZE - 12].copy_from_slice(&bytes);
            all[HEADER_SIZE - 12..].copy_from_slice(&tail);
            prop_assert_eq!(Header::from_bytes(&all).to_bytes(), all);
        }
    }
}
