//! Philox 4x32-10 on the host: what the kernel is checked against.

/// The block of `counter` under `key` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
pub(super) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut low, mut high]) = (counter, key);
    for _ in 0..10 {
        let product_a = u64::from(a) * 0xD251_1F53;
        let product_c = u64::from(c) * 0xCD9E_8D57;
        a = (product_c >> 32) as u32 ^ b ^ low;
        b = product_c as u32;
        c = (product_a >> 32) as u32 ^ d ^ high;
        d = product_a as u32;
        low = low.wrapping_add(0x9E37_79B9);
        high = high.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

/// The known answers that Random123 publishes for philox4x32 with ten rounds.
#[test]
fn known_answers() {
    let zeros = philox([0; 4], [0; 2]);
    assert_eq!(zeros, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
    assert_eq!(ones, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    let pi = philox(
        [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
        [0xa4093822, 0x299f31d0],
    );
    assert_eq!(pi, [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
}
