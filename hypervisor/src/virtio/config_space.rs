//! Reading a device's configuration space.

/// Copies what lies at `offset` of the configuration `space` to `data`; what lies beyond its end is zero.
pub fn read(space: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|offset| space.get(offset..))
        .unwrap_or(&[]);
    let (head, tail) = data.split_at_mut(rest.len().min(data.len()));
    head.copy_from_slice(rest.get(..head.len()).unwrap_or(rest));
    tail.fill(0);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_width_at_every_offset_reads_the_space_and_zeroes_behind(
            space in proptest::collection::vec(any::<u8>(), 0..40),
            offset in prop_oneof![0u64..64, any::<u64>()],
            width in 0usize..16,
        ) {
            let mut data = vec![0xaa; width];
            read(&space, offset, &mut data);
            for (index, byte) in data.iter().enumerate() {
                let expected = offset
                    .checked_add(index as u64)
                    .and_then(|at| space.get(usize::try_from(at).ok()?))
                    .copied()
                    .unwrap_or(0);
                prop_assert_eq!(*byte, expected);
            }
        }
    }
}
