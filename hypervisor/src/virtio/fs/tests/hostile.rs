//! Whatever a guest sends.

use std::fs;

use proptest::prelude::*;
use virtiofsd::fuse::InHeader;

use super::super::VirtioDevice;
use super::super::fake_guest::{Guest, bytes, config, name};
use super::*;

/// Requests as a hostile kernel sends them: nearly right, or not at all.
fn hostile_request() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![0u32..55, any::<u32>()];
    let node = prop_oneof![0u64..6, Just(u64::MAX), any::<u64>()];
    let length = prop_oneof![
        Just(None),
        any::<u32>().prop_map(Some),
        (0u32..200).prop_map(Some)
    ];
    let number = prop_oneof![
        0u64..6,
        Just(u64::MAX),
        Just(i64::MAX as u64),
        Just(1 << 32),
        any::<u64>()
    ];
    let part = prop_oneof![
        number.prop_map(|n| n.to_le_bytes().to_vec()),
        (0u32..5000).prop_map(|n| n.to_le_bytes().to_vec()),
        prop_oneof![
            Just("a"),
            Just("d0"),
            Just("f0"),
            Just(".."),
            Just("x/y"),
            Just("")
        ]
        .prop_map(name),
        proptest::collection::vec(any::<u8>(), 0..20),
    ];
    let body = proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat());
    (opcode, node, length, body, any::<u16>(), 0usize..200).prop_map(
        |(opcode, nodeid, length, body, extra, cut)| {
            let header = InHeader {
                len: length.unwrap_or((size_of::<InHeader>() + body.len()) as u32),
                opcode,
                unique: 7,
                nodeid,
                total_extlen: extra,
                ..Default::default()
            };
            let mut request = [bytes(header), body].concat();
            if cut < 20 {
                request.truncate(cut * 4);
            }
            request
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_guest_sends_the_share_goes_on(
        requests in proptest::collection::vec((hostile_request(), prop_oneof![0u32..40, Just(5000u32)]), 1..60),
        mounted: bool,
    ) {
        let outer = directory();
        let path = outer.path().join("share");
        fs::create_dir(&path).unwrap();
        many_files(&path, 1, 3);
        let mut guest = Guest::new(&config(&path));
        if mounted {
            guest.init();
            guest.device.share.nodes().hold_at_most(1);
            let node = guest.walk("d0/f0").unwrap();
            guest.open(node, libc::O_RDWR).unwrap();
        }
        for (request, room) in &requests {
            if let Some((header, _)) = guest.call_raw(request, *room) {
                prop_assert!(header.error <= 0 && header.error > -4096, "{header:?}");
            }
        }
        guest.init();
        prop_assert!(guest.attributes(1).is_ok());
        prop_assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 1);
    }

    #[test]
    fn whatever_chain_a_guest_queues_the_device_goes_on_or_asks_for_a_reset(
        chains in proptest::collection::vec((0usize..2, proptest::collection::vec(
            (prop_oneof![0x10_0000u64..0x11_0000, any::<u64>()], prop_oneof![0u32..100, any::<u32>()], 0u16..8),
            1..6,
        )), 1..20),
    ) {
        let dir = directory();
        let mut guest = Guest::mounted(&config(dir.path()));
        for (queue, chain) in &chains {
            if guest.submit(*queue, chain).is_none() {
                break;
            }
        }
        guest.device.reset();
    }
}
