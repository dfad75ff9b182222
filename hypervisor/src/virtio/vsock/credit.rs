//! Who may send how much (virtio 1.2, section 5.10.6.3): each side tells the size of its buffer for
//! a connection (`buf_alloc`) and how much it has taken out of it so far (`fwd_cnt`, modulo 2^32),
//! and the other never has more than that under way.

/// The buffer that a new connection is granted for what the guest sends, in bytes. All
/// connections that there may be get this much.
pub const FIRST_GRANT: u32 = 16 * 1024;

/// The most that one connection is granted, in bytes; Linux grants as much by default.
pub const LARGEST_GRANT: u32 = 256 * 1024;

/// What all connections together may be granted beyond their [`FIRST_GRANT`], in bytes.
pub const SHARED_GRANTS: u32 = 16 * 1024 * 1024;

/// The guest broke the rules of credit; the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreditError {
    /// The guest says that it took more than it was sent.
    #[error("The guest acknowledged data that it was not sent")]
    Acknowledged,
    /// The guest sent more than it may.
    #[error("The guest sent more data than it has credit for")]
    Exceeded,
}

/// What the guest takes.
#[derive(Debug, Default)]
pub struct GuestWindow {
    sent: u32,
    taken: u32,
    alloc: u32,
}

impl GuestWindow {
    /// The guest told its buffer's size and how much it has taken. A count older than the last one
    /// changes nothing: the guest's threads count under one lock and queue their packets under another.
    ///
    /// # Errors
    ///
    /// The count is ahead of what was sent.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> Result<(), CreditError> {
        let newly_taken = fwd_cnt.wrapping_sub(self.taken);
        if newly_taken <= self.under_way() {
            self.taken = fwd_cnt;
        } else if newly_taken < 1 << 31 {
            return Err(CreditError::Acknowledged);
        }
        self.alloc = buf_alloc;
        Ok(())
    }

    /// How many bytes may be sent now.
    pub fn available(&self) -> u32 {
        self.alloc.saturating_sub(self.under_way())
    }

    /// Sends `count` bytes, no more than are [`available`](Self::available).
    pub fn send(&mut self, count: u32) {
        self.sent = self.sent.wrapping_add(count);
    }

    fn under_way(&self) -> u32 {
        self.sent.wrapping_sub(self.taken)
    }
}

/// What the guest may send.
#[derive(Debug)]
pub struct HostWindow {
    received: u32,
    taken: u32,
    grant: u32,
    // What the guest was told last.
    told_taken: u32,
    told_grant: u32,
    taken_since_growth: u32,
}

impl HostWindow {
    /// Of a new connection.
    pub fn new() -> Self {
        Self {
            received: 0,
            taken: 0,
            grant: FIRST_GRANT,
            told_taken: 0,
            told_grant: FIRST_GRANT,
            taken_since_growth: 0,
        }
    }

    /// The guest sent `count` bytes.
    ///
    /// # Errors
    ///
    /// It has no credit for so many.
    pub fn receive(&mut self, count: u32) -> Result<(), CreditError> {
        let held = self.received.wrapping_sub(self.taken);
        match held.checked_add(count) {
            Some(sum) if sum <= self.grant => {
                self.received = self.received.wrapping_add(count);
                Ok(())
            }
            _ => Err(CreditError::Exceeded),
        }
    }

    /// `count` of the received bytes are no longer held.
    pub fn take(&mut self, count: u32) {
        self.taken = self.taken.wrapping_add(count);
        self.taken_since_growth = self.taken_since_growth.saturating_add(count);
    }

    /// `buf_alloc` and `fwd_cnt` for a packet that goes out now.
    pub fn tell(&mut self) -> (u32, u32) {
        self.told_taken = self.taken;
        self.told_grant = self.grant;
        (self.grant, self.taken)
    }

    /// Whether the guest should be told before it stalls: by what it knows, less than half of the
    /// buffer is free, and in truth more is.
    pub fn is_worth_telling(&self) -> bool {
        let known_free = self
            .told_grant
            .saturating_sub(self.received.wrapping_sub(self.told_taken));
        let news = self.taken != self.told_taken || self.grant != self.told_grant;
        news && known_free < self.grant / 2
    }

    /// How much more a connection gets whose data goes through without being held: once a whole
    /// buffer has passed, a second one.
    pub fn wanted_growth(&self) -> u32 {
        let moves = self.received == self.taken && self.taken_since_growth >= self.grant;
        match moves && self.grant < LARGEST_GRANT {
            true => self.grant,
            false => 0,
        }
    }

    /// Grants `more` bytes.
    pub fn grow(&mut self, more: u32) {
        self.grant = self.grant.saturating_add(more);
        self.taken_since_growth = 0;
    }

    /// What is granted beyond [`FIRST_GRANT`].
    pub fn growth(&self) -> u32 {
        self.grant - FIRST_GRANT
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_guest_gets_what_it_has_room_for() {
        let mut window = GuestWindow::default();
        assert_eq!(window.available(), 0);
        window.update(100, 0).unwrap();
        window.send(60);
        assert_eq!(window.available(), 40);
        window.update(100, 25).unwrap();
        assert_eq!(window.available(), 65);
        window.update(10, 25).unwrap();
        assert_eq!(window.available(), 0);
    }

    #[test]
    fn an_older_count_changes_nothing_and_one_ahead_is_an_error() {
        let mut window = GuestWindow::default();
        window.update(100, 0).unwrap();
        window.send(50);
        window.update(100, 30).unwrap();
        window.update(100, 10).unwrap();
        assert_eq!(window.available(), 80);
        assert_eq!(window.update(100, 51), Err(CreditError::Acknowledged));
        assert_eq!(window.available(), 80);
    }

    #[test]
    fn counts_wrap() {
        let mut window = GuestWindow::default();
        for _ in 0..5 {
            window.update(u32::MAX, window.sent).unwrap();
            window.send(1 << 30);
        }
        window.update(u32::MAX, window.sent).unwrap();
        assert_eq!(window.available(), u32::MAX);
        let mut window = HostWindow::new();
        window.received = u32::MAX - 5;
        window.take(u32::MAX - 5);
        window.receive(10).unwrap();
        window.take(10);
        assert_eq!(window.tell(), (FIRST_GRANT, 4));
    }

    #[test]
    fn data_beyond_the_grant_is_refused() {
        let mut window = HostWindow::new();
        window.receive(FIRST_GRANT).unwrap();
        assert_eq!(window.receive(1), Err(CreditError::Exceeded));
        assert_eq!(window.receive(u32::MAX), Err(CreditError::Exceeded));
        window.take(1);
        window.receive(1).unwrap();
    }

    #[test]
    fn the_guest_is_told_before_it_stalls_and_not_for_each_byte() {
        let mut window = HostWindow::new();
        window.receive(FIRST_GRANT / 2).unwrap();
        window.take(FIRST_GRANT / 2);
        assert!(!window.is_worth_telling());
        window.receive(1).unwrap();
        assert!(window.is_worth_telling());
        window.tell();
        assert!(!window.is_worth_telling());
        window.take(1);
        assert!(!window.is_worth_telling());
    }

    #[test]
    fn a_guest_that_used_all_it_knows_of_is_always_told() {
        let mut window = HostWindow::new();
        window.receive(FIRST_GRANT).unwrap();
        assert!(!window.is_worth_telling(), "nothing was taken yet");
        window.take(1);
        assert!(window.is_worth_telling());
    }

    #[test]
    fn a_connection_that_moves_is_granted_more_up_to_the_largest() {
        let mut window = HostWindow::new();
        let mut grants = vec![];
        for _ in 0..100 {
            window.receive(FIRST_GRANT).unwrap();
            assert_eq!(window.wanted_growth(), 0, "held data is no reason");
            window.take(FIRST_GRANT);
            let more = window.wanted_growth();
            if more > 0 {
                window.grow(more);
                grants.push(window.grant);
            }
        }
        assert_eq!(grants, [32 << 10, 64 << 10, 128 << 10, 256 << 10]);
        assert_eq!(window.growth(), LARGEST_GRANT - FIRST_GRANT);
    }

    proptest! {
        #[test]
        fn whatever_the_guest_tells_no_more_is_sent_than_its_buffer_holds(
            told in proptest::collection::vec((any::<u32>(), any::<u32>(), 0u32..100_000), 1..200),
        ) {
            let mut window = GuestWindow::default();
            for (alloc, count, want) in told {
                let _ = window.update(alloc, count);
                let now = want.min(window.available());
                window.send(now);
                if now > 0 {
                    prop_assert!(window.under_way() <= window.alloc);
                }
            }
        }

        #[test]
        fn whatever_the_guest_sends_no_more_is_held_than_granted(
            sent in proptest::collection::vec((any::<u32>(), 0u32..100_000), 1..200),
        ) {
            let mut window = HostWindow::new();
            let mut held = 0u64;
            for (count, taken) in sent {
                if window.receive(count).is_ok() {
                    held += u64::from(count);
                }
                prop_assert!(held <= u64::from(FIRST_GRANT));
                let taken = u64::from(taken).min(held);
                window.take(taken as u32);
                held -= taken;
            }
        }
    }
}
