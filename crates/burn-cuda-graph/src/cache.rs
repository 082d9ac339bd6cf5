//! The bounded cache of entries, one per shape key.
//!
//! Which graph goes when a bound is passed is the engine's to say: it knows what each is worth.
//!
//! Two bounds: sealed graphs (by number and by bytes), which hold device memory, and entries of any phase, which
//! hold host memory only but would grow without end on a stream of ever-new shapes.

use crate::shape_key::ShapeKey;
use std::collections::HashMap;

/// Entries of any phase held at once.
const MAX_ENTRIES: usize = 512;

#[derive(Debug)]
struct Slot<E> {
    entry: E,
    last_used: u64,
}

/// What the cache needs to know of an entry.
pub(crate) trait CacheEntry {
    /// Bytes its sealed graph holds; `None` when it holds none.
    fn sealed_bytes(&self) -> Option<u64>;
}

/// Entries by key.
#[derive(Debug)]
pub(crate) struct Cache<E> {
    slots: HashMap<ShapeKey, Slot<E>>,
    clock: u64,
}

impl<E: CacheEntry> Cache<E> {
    pub fn new() -> Self {
        Self {
            slots: HashMap::new(),
            clock: 0,
        }
    }

    pub fn contains(&self, key: &ShapeKey) -> bool {
        self.slots.contains_key(key)
    }

    /// The entry of `key`, made by `make` when there is none, marked as just used.
    pub fn entry(&mut self, key: &ShapeKey, make: impl FnOnce() -> E) -> &mut E {
        self.clock += 1;
        if !self.slots.contains_key(key) && self.slots.len() >= MAX_ENTRIES {
            self.drop_oldest_unsealed();
        }
        let clock = self.clock;
        let slot = self.slots.entry(key.clone()).or_insert_with(|| Slot {
            entry: make(),
            last_used: clock,
        });
        slot.last_used = clock;
        &mut slot.entry
    }

    /// The entry of `key`, marked as just used.
    pub fn touch(&mut self, key: &ShapeKey) -> Option<&mut E> {
        let slot = self.slots.get_mut(key)?;
        self.clock += 1;
        slot.last_used = self.clock;
        Some(&mut slot.entry)
    }

    /// The entry of `key`, left as recently used as it was.
    pub fn get(&self, key: &ShapeKey) -> Option<&E> {
        self.slots.get(key).map(|slot| &slot.entry)
    }

    pub fn get_mut(&mut self, key: &ShapeKey) -> Option<&mut E> {
        self.slots.get_mut(key).map(|slot| &mut slot.entry)
    }

    /// Take the entry of `key` out.
    pub fn remove(&mut self, key: &ShapeKey) -> Option<E> {
        self.slots.remove(key).map(|slot| slot.entry)
    }

    pub fn sealed_count(&self) -> usize {
        self.iter()
            .filter(|(_, entry)| entry.sealed_bytes().is_some())
            .count()
    }

    pub fn sealed_bytes(&self) -> u64 {
        self.iter()
            .filter_map(|(_, entry)| entry.sealed_bytes())
            .sum()
    }

    /// The sealed entry other than `keep` that is worth least, when the bounds are passed.
    pub fn over_bounds(
        &self,
        max_graphs: usize,
        max_bytes: Option<u64>,
        keep: &ShapeKey,
        worth: impl Fn(&E) -> f64,
    ) -> Option<ShapeKey> {
        let over = self.sealed_count() > max_graphs
            || max_bytes.is_some_and(|max| self.sealed_bytes() > max);
        if !over {
            return None;
        }
        self.least(keep, worth)
    }

    /// The sealed entry other than `keep` that is worth least, and of equals the least recently used.
    pub fn least(&self, keep: &ShapeKey, worth: impl Fn(&E) -> f64) -> Option<ShapeKey> {
        self.slots
            .iter()
            .filter(|(key, slot)| *key != keep && slot.entry.sealed_bytes().is_some())
            .map(|(key, slot)| (key, worth(&slot.entry), slot.last_used))
            .min_by(|(_, a, used_a), (_, b, used_b)| a.total_cmp(b).then(used_a.cmp(used_b)))
            .map(|(key, ..)| key.clone())
    }

    pub fn iter(&self) -> impl Iterator<Item = (&ShapeKey, &E)> {
        self.slots.iter().map(|(key, slot)| (key, &slot.entry))
    }

    pub fn clear(&mut self) -> usize {
        let sealed = self.sealed_count();
        self.slots.clear();
        sealed
    }

    fn drop_oldest_unsealed(&mut self) {
        let oldest = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.entry.sealed_bytes().is_none())
            .min_by_key(|(_, slot)| slot.last_used)
            .map(|(key, _)| key.clone());
        if let Some(key) = oldest {
            self.slots.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Entry(Option<u64>);
    impl CacheEntry for Entry {
        fn sealed_bytes(&self) -> Option<u64> {
            self.0
        }
    }

    fn key(rate: u64) -> ShapeKey {
        ShapeKey {
            tensors: vec![],
            host: vec![],
            rate_classes: Vec::new(),
            learning_rate_bits: Some(vec![rate]),
        }
    }

    /// The bound holds whatever comes: no stream of new keys makes the host map grow without end, and sealed
    /// graphs are never dropped to make room for a key that is only warming up.
    #[test]
    fn a_stream_of_new_keys_stays_bounded_and_spares_sealed_graphs() {
        let mut cache = Cache::new();
        cache.entry(&key(0), || Entry(Some(10)));
        for rate in 1..5000 {
            cache.entry(&key(rate), || Entry(None));
        }
        assert!(cache.slots.len() <= MAX_ENTRIES);
        assert!(cache.contains(&key(0)));
        assert_eq!(cache.sealed_bytes(), 10);
    }

    /// By number or by bytes, what is worth least goes first, of equals the least recently used, and the newest is never
    /// the victim.
    #[test]
    fn the_graph_worth_least_is_evicted() {
        let mut cache = Cache::new();
        for rate in 0..3 {
            cache.entry(&key(rate), || Entry(Some(100)));
        }
        cache.entry(&key(0), || Entry(None));
        let over = |max_graphs, max_bytes, keep| {
            cache.over_bounds(max_graphs, max_bytes, &key(keep), |_| 1.0)
        };
        assert_eq!(over(3, None, 2), None);
        assert_eq!(over(2, None, 2), Some(key(1)));
        assert_eq!(over(8, Some(250), 1), Some(key(2)));
        assert_eq!(over(8, Some(300), 1), None);
        let small = |entry: &Entry| -(entry.0.unwrap_or(0) as f64);
        cache.entry(&key(3), || Entry(Some(500)));
        assert_eq!(cache.least(&key(0), small), Some(key(3)));
    }
}
