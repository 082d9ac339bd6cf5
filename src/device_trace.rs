//! What an NVIDIA card did and when, told by CUPTI: each kernel and copy, also those inside a replayed graph.
//!
//! CUPTI comes with the CUDA toolkit and is looked for when a trace is asked for; without it there is none. Only the first
//! fields of its records are read, which have kept their places since CUDA 11.

#![allow(unsafe_code)]

use std::collections::BTreeMap;

/// One kernel, copy or fill on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Activity {
    /// The kernel's name, or `copy` or `fill`.
    pub name: String,
    /// When it began, in nanoseconds on the trace's own clock.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The graph that it was a node of; 0 outside of graphs.
    pub graph: u32,
}

/// Nanoseconds in which at least one of `activities` ran.
pub fn busy_ns(activities: &[Activity]) -> u64 {
    let mut spans: Vec<(u64, u64)> = (activities.iter())
        .map(|activity| (activity.start_ns, activity.end_ns))
        .collect();
    spans.sort_unstable();
    let (mut busy, mut reached) = (0, 0);
    for (start, end) in spans {
        let start = start.max(reached);
        busy += end.saturating_sub(start);
        reached = reached.max(end);
    }
    busy
}

/// Number and nanoseconds of each kind of activity, the longest in sum first.
pub fn by_name(activities: &[Activity]) -> Vec<(String, usize, u64)> {
    let mut sums: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for activity in activities {
        let sum = sums.entry(&activity.name).or_default();
        sum.0 += 1;
        sum.1 += activity.end_ns.saturating_sub(activity.start_ns);
    }
    let mut sums: Vec<(String, usize, u64)> = (sums.into_iter())
        .map(|(name, (count, ns))| (name.to_string(), count, ns))
        .collect();
    sums.sort_by_key(|(_, _, ns)| std::cmp::Reverse(*ns));
    sums
}

#[cfg(feature = "cuda")]
pub use cupti::Trace;

#[cfg(feature = "cuda")]
mod cupti {
    use super::Activity;
    use libloading::Library;
    use std::alloc::{Layout, alloc, dealloc};
    use std::ffi::{CStr, c_char, c_void};
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};

    const COPY: u32 = 1;
    const FILL: u32 = 2;
    const KERNEL: u32 = 10;
    const FORCED: u32 = 1;
    const BUFFER_BYTES: usize = 8 << 20;

    type Requested = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
    type Completed = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

    /// The functions used, and the library that keeps them.
    struct Cupti {
        enable: unsafe extern "C" fn(u32) -> u32,
        disable: unsafe extern "C" fn(u32) -> u32,
        flush: unsafe extern "C" fn(u32) -> u32,
        next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
        _library: Library,
    }

    static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();
    static RECORDS: Mutex<Vec<Activity>> = Mutex::new(Vec::new());

    fn layout() -> Option<Layout> {
        Layout::from_size_align(BUFFER_BYTES, 8).ok()
    }

    extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
        let Some(layout) = layout() else {
            return;
        };
        // SAFETY: the layout is not empty. CUPTI passes places to write its buffer, the buffer's size and the most records
        // to (0: as many as fit), and hands the buffer back to `completed`, which frees it.
        unsafe {
            let memory = alloc(layout);
            *buffer = memory;
            *size = if memory.is_null() { 0 } else { BUFFER_BYTES };
            *records = 0;
        }
    }

    extern "C" fn completed(
        _context: *mut c_void,
        _stream: u32,
        buffer: *mut u8,
        _size: usize,
        valid: usize,
    ) {
        if let Some(Ok(cupti)) = CUPTI.get() {
            let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
            let mut record = std::ptr::null_mut();
            // SAFETY: `buffer` holds `valid` bytes of records, which `next` walks: it leaves `record` at the next one and
            // answers 0, or something else after the last.
            while unsafe { (cupti.next)(buffer, valid, &mut record) } == 0 {
                // SAFETY: `record` is a record of that buffer.
                records.extend(unsafe { read(record) });
            }
        }
        if let Some(layout) = layout().filter(|_| !buffer.is_null()) {
            // SAFETY: `requested` made it with this layout, and CUPTI is done with it.
            unsafe { dealloc(buffer, layout) };
        }
    }

    /// # Safety
    ///
    /// `record` must be a record of CUPTI.
    unsafe fn read(record: *const u8) -> Option<Activity> {
        /// # Safety
        ///
        /// `record` must have a `T` at `offset`.
        unsafe fn at<T: Copy>(record: *const u8, offset: usize) -> T {
            // SAFETY: the caller's.
            unsafe { record.add(offset).cast::<T>().read_unaligned() }
        }
        // SAFETY: every record begins with its kind; the other places are those of CUpti_ActivityKernel5 and later,
        // CUpti_ActivityMemcpy3 and later, and CUpti_ActivityMemset2 and later, by that kind. A kernel's name lives as long
        // as the process.
        unsafe {
            let kind: u32 = at(record, 0);
            let (name, start, end, graph) = match kind {
                KERNEL => {
                    let name: *const c_char = at(record, 104);
                    let name = match name.is_null() {
                        true => "?".to_string(),
                        false => CStr::from_ptr(name).to_string_lossy().into_owned(),
                    };
                    (name, at(record, 16), at(record, 24), at(record, 156))
                }
                COPY => (
                    "copy".into(),
                    at(record, 16),
                    at(record, 24),
                    at(record, 72),
                ),
                FILL => (
                    "fill".into(),
                    at(record, 16),
                    at(record, 24),
                    at(record, 72),
                ),
                _ => return None,
            };
            Some(Activity {
                name,
                start_ns: start,
                end_ns: end,
                graph,
            })
        }
    }

    fn load() -> Result<Cupti, String> {
        let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
        let folders = (["CUDA_HOME", "CUDA_PATH"].iter())
            .filter_map(std::env::var_os)
            .map(PathBuf::from)
            .chain(["/usr/local/cuda".into(), "/opt/cuda".into()])
            .flat_map(|root: PathBuf| ["extras/CUPTI/lib64", "lib64"].map(|lib| root.join(lib)));
        let places = (names.iter().map(PathBuf::from))
            .chain(folders.flat_map(|folder| names.map(|name| folder.join(name))));
        let mut said = String::new();
        for place in places {
            // SAFETY: CUPTI's initializers have no demands on the caller.
            match unsafe { Library::new(&place) } {
                Ok(library) => return bind(library),
                Err(error) => said = error.to_string(),
            }
        }
        Err(format!("CUPTI was not found: {said}"))
    }

    fn bind(library: Library) -> Result<Cupti, String> {
        let missing = |error: libloading::Error| error.to_string();
        // SAFETY: these are the functions' signatures in cupti_activity.h; enums are 32 bits wide.
        unsafe {
            let register = library
                .get::<unsafe extern "C" fn(Requested, Completed) -> u32>(
                    b"cuptiActivityRegisterCallbacks\0",
                )
                .map(|function| *function)
                .map_err(missing)?;
            let cupti = Cupti {
                enable: *library.get(b"cuptiActivityEnable\0").map_err(missing)?,
                disable: *library.get(b"cuptiActivityDisable\0").map_err(missing)?,
                flush: *library.get(b"cuptiActivityFlushAll\0").map_err(missing)?,
                next: *(library.get(b"cuptiActivityGetNextRecord\0")).map_err(missing)?,
                _library: library,
            };
            match register(requested, completed) {
                0 => Ok(cupti),
                status => Err(format!("cuptiActivityRegisterCallbacks answered {status}")),
            }
        }
    }

    /// A trace that is being taken. One at a time in a process.
    #[derive(Debug)]
    pub struct Trace(());

    impl Trace {
        /// Begin. A graph's nodes are told apart only where it is launched after this.
        ///
        /// # Errors
        ///
        /// When there is no CUPTI, or it refuses (another profiler has it).
        pub fn start() -> Result<Self, String> {
            let cupti = CUPTI.get_or_init(load).as_ref().map_err(Clone::clone)?;
            for kind in [KERNEL, COPY, FILL] {
                // SAFETY: a kind of activity; the library lives as long as the process.
                match unsafe { (cupti.enable)(kind) } {
                    0 => {}
                    status => return Err(format!("cuptiActivityEnable({kind}) answered {status}")),
                }
            }
            RECORDS
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
            Ok(Self(()))
        }

        /// What ran since, in the order of its beginning. The device must have been waited for.
        pub fn finish(self) -> Vec<Activity> {
            if let Some(Ok(cupti)) = CUPTI.get() {
                // SAFETY: as above; `flush` calls `completed` on this thread, which takes the records' lock by itself.
                unsafe {
                    (cupti.flush)(FORCED);
                    for kind in [KERNEL, COPY, FILL] {
                        (cupti.disable)(kind);
                    }
                }
            }
            let records = &mut *RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
            let mut records = std::mem::take(records);
            records.sort_by_key(|activity| activity.start_ns);
            records
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(name: &str, start_ns: u64, end_ns: u64) -> Activity {
        Activity {
            name: name.into(),
            start_ns,
            end_ns,
            graph: 0,
        }
    }

    /// What overlaps counts once, and gaps do not count.
    #[test]
    fn busy_time_is_that_of_the_union() {
        let all = [
            activity("a", 10, 20),
            activity("b", 15, 30),
            activity("a", 17, 19),
            activity("c", 40, 45),
        ];
        assert_eq!(busy_ns(&all), 20 + 5);
        assert_eq!(busy_ns(&[]), 0);
        let names: Vec<_> = by_name(&all);
        assert_eq!(names[0], ("b".to_string(), 1, 15));
        assert_eq!(names[1], ("a".to_string(), 2, 12));
    }
}
