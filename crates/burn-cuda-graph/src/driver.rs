//! The capture window and the four graph primitives.
//!
//! The driver's rules shape it. A stream in capture mode records every launch issued on it, so a window that
//! opened has to be closed on every path, an unwinding one included: [`Window`] closes it when it drops. A
//! prepared stream refuses another preparation until it is unwound: [`Prepared`] does that when it drops. One
//! window at a time is open in the process ([`exclusive`]), since the driver's capture mode is global and two
//! trainers may share a device.
//!
//! This is the only module with `unsafe`.

use burn::tensor::Device;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// The primitives a window is made of. A scripted one stands in for the device in the tests.
pub(crate) trait CaptureDriver {
    /// A sealed recording.
    type Graph;

    /// Prepare the stream for a window.
    fn prepare(&self) -> Result<(), String>;
    /// Open the window: launches are recorded from here, and none executes.
    fn start(&self) -> Result<(), String>;
    /// Close the window, or unwind a preparation that opened none.
    fn stop(&self) -> Result<Self::Graph, String>;
}

/// Hold the process's one window; `None` when another thread holds it for longer than a recording takes.
///
/// A bounded wait, since a user's closure runs under it and may itself wait for a thread that wants it. A panic inside
/// an earlier window does not keep later ones out: the guard has closed that window by then.
pub(crate) fn exclusive() -> Option<MutexGuard<'static, ()>> {
    static WINDOW: Mutex<()> = Mutex::new(());
    lock_patiently(&WINDOW)
}

/// Lock within a bounded time, whether or not an earlier holder panicked.
pub(crate) fn lock_patiently(mutex: &'static Mutex<()>) -> Option<MutexGuard<'static, ()>> {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// A stream prepared for capture, unwound when it drops.
pub(crate) struct Prepared<'d, D: CaptureDriver> {
    driver: &'d D,
    armed: bool,
}

impl<'d, D: CaptureDriver> Prepared<'d, D> {
    /// Prepare the driver's stream.
    ///
    /// # Errors
    ///
    /// The driver's words; the stream is as it was.
    pub fn new(driver: &'d D) -> Result<Self, String> {
        driver.prepare()?;
        Ok(Self {
            driver,
            armed: true,
        })
    }

    /// Open the window.
    ///
    /// # Errors
    ///
    /// The driver's words; the preparation is unwound.
    pub fn open(mut self) -> Result<Window<'d, D>, String> {
        // On an error `self` drops armed, which unwinds the preparation.
        self.driver.start()?;
        self.armed = false;
        Ok(Window {
            driver: self.driver,
            open: true,
        })
    }
}

impl<D: CaptureDriver> Drop for Prepared<'_, D> {
    fn drop(&mut self) {
        if self.armed {
            // A stop without a window answers with an error by design; what matters is that the stream is free.
            drop(self.driver.stop());
        }
    }
}

/// An open window, closed when it drops.
pub(crate) struct Window<'d, D: CaptureDriver> {
    driver: &'d D,
    open: bool,
}

impl<D: CaptureDriver> Window<'_, D> {
    /// Close the window and seal what it recorded.
    ///
    /// # Errors
    ///
    /// The driver's words. The window is closed all the same, and the buffers that its launches would have
    /// written are unreadable until something writes them.
    pub fn seal(mut self) -> Result<D::Graph, String> {
        self.open = false;
        self.driver.stop()
    }
}

impl<D: CaptureDriver> Drop for Window<'_, D> {
    fn drop(&mut self) {
        if self.open {
            drop(self.driver.stop());
        }
    }
}

#[cfg(feature = "cubecl-backend")]
pub(crate) use device::{DeviceDriver, SealedGraph};

/// Let the calling thread read tensors and wait for the device while another thread's step is being recorded.
///
/// CubeCL opens its windows in the CUDA driver's global mode: a thread that waits for an event meanwhile (any read of a
/// tensor does) is refused, with status 900, and spoils the recording. This puts the calling thread into the mode in
/// which other threads' windows are not its business. Threads that make or run a
/// [`GraphedStep`](crate::GraphedStep) are put into it by that; call it once on every other thread that uses the device
/// while a step may be recorded.
///
/// Does nothing without the feature `cuda` or without a CUDA driver.
pub fn tolerate_captures() {
    #[cfg(feature = "cuda")]
    capture_mode::tolerate_captures();
}

/// Whether the CUDA driver's library loads. Without it every call into the driver panics.
#[cfg(feature = "cuda")]
#[expect(unsafe_code)]
fn has_cuda_driver() -> bool {
    // SAFETY: it only looks for the driver's library.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// The driver's per-thread capture mode.
#[cfg(feature = "cuda")]
mod capture_mode {
    use super::has_cuda_driver;
    use cudarc::driver::sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};
    use std::cell::Cell;

    pub(super) fn tolerate_captures() {
        thread_local! {
            static DONE: Cell<bool> = const { Cell::new(false) };
        }
        if !DONE.replace(true) {
            exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        }
    }

    /// Set the calling thread's mode; the one it had, where there is a driver.
    #[expect(unsafe_code)]
    pub(super) fn exchange(mode: CUstreamCaptureMode) -> Option<CUstreamCaptureMode> {
        if !has_cuda_driver() {
            return None;
        }
        let mut mode = mode;
        // SAFETY: `mode` is a valid pointer for the call, which reads and writes it and nothing else; the library is
        // present, as was just checked.
        let status = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) };
        match status.result() {
            Ok(()) => Some(mode),
            Err(err) => {
                log::debug!("the thread's capture mode stays as it is: {err}");
                None
            }
        }
    }
}

#[cfg(feature = "nvtx")]
pub(crate) use nvtx::Range;

/// What of NVIDIA's software is on this machine, as far as the loader and the driver tell.
///
/// For diagnosis. It opens no device, and it does not panic where a library is missing, which cudarc does at the first
/// call into one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaLibraries {
    /// The driver's library loads; nothing else below is known otherwise.
    pub driver: bool,
    /// The newest CUDA that the driver supports, as it counts: 12080 is 12.8.
    pub cuda_version: Option<u32>,
    /// The NVTX library loads. `None` without the feature `nvtx`.
    pub nvtx: Option<bool>,
}

/// Looks for NVIDIA's libraries; `None` without the feature `cuda`.
pub fn cuda_libraries() -> Option<CudaLibraries> {
    #[cfg(feature = "cuda")]
    return Some(libraries::find());
    #[cfg(not(feature = "cuda"))]
    None
}

/// Memory of a device, as its driver counts it for all processes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// Bytes that can be allocated now.
    pub free_bytes: u64,
    /// Bytes that the device has.
    pub total_bytes: u64,
}

/// The memory of `device`; `None` where no driver says it: for every device but CUDA's, and without the feature `cuda`.
pub fn device_memory(device: &Device) -> Option<DeviceMemory> {
    #[cfg(feature = "cuda")]
    if let Some(burn_cubecl::CubeDevice::Cuda(device)) = crate::pool::cube_device(device) {
        return memory::of(device.index);
    }
    let _ = device;
    None
}

#[cfg(feature = "cuda")]
mod memory {
    use super::{DeviceMemory, has_cuda_driver};
    use cudarc::driver::DriverError;
    use cudarc::driver::result::{ctx, device, init, mem_get_info, primary_ctx};

    /// The memory of the device of this ordinal.
    pub(super) fn of(ordinal: usize) -> Option<DeviceMemory> {
        let ordinal = i32::try_from(ordinal).ok()?;
        if !has_cuda_driver() {
            return None;
        }
        match ask(ordinal) {
            Ok((free, total)) => Some(DeviceMemory {
                free_bytes: free as u64,
                total_bytes: total as u64,
            }),
            Err(err) => {
                log::debug!("the driver does not say how much memory is free: {err}");
                None
            }
        }
    }

    #[expect(unsafe_code)]
    fn ask(ordinal: i32) -> Result<(usize, usize), DriverError> {
        init()?;
        let device = device::get(ordinal)?;
        // SAFETY: the device is one that the driver just gave. The context is the one that CubeCL works in; a reference
        // to it is taken here and given back below, so it is alive in between.
        let context = unsafe { primary_ctx::retain(device) }?;
        let before = ctx::get_current();
        // SAFETY: the context is alive. It becomes the thread's current one, and the one before it is put back below.
        let asked = unsafe { ctx::set_current(context) }.and_then(|()| mem_get_info());
        if let Ok(before) = before {
            // SAFETY: it was current before, whoever made it so; null stands for none.
            let restored = unsafe { ctx::set_current(before.unwrap_or(core::ptr::null_mut())) };
            if let Err(err) = restored {
                log::debug!("the thread's CUDA context could not be put back: {err}");
            }
        }
        // SAFETY: the device is one that the driver gave, and this is the reference that was taken above.
        unsafe { primary_ctx::release(device) }?;
        asked
    }
}

#[cfg(feature = "cuda")]
mod libraries {
    use super::{CudaLibraries, has_cuda_driver};
    use cudarc::driver::sys::cuDriverGetVersion;

    pub(super) fn find() -> CudaLibraries {
        let driver = has_cuda_driver();
        CudaLibraries {
            driver,
            cuda_version: driver.then(cuda_version).flatten(),
            #[cfg(feature = "nvtx")]
            nvtx: Some(super::nvtx::is_present()),
            #[cfg(not(feature = "nvtx"))]
            nvtx: None,
        }
    }

    /// The driver's library has to be present.
    #[expect(unsafe_code)]
    fn cuda_version() -> Option<u32> {
        let mut version = 0;
        // SAFETY: `version` is a valid pointer for the call, which writes it and nothing else, and needs no initialized
        // driver; the library is present, which the only caller has checked.
        let status = unsafe { cuDriverGetVersion(&mut version) };
        // Zero stands for no driver behind the library.
        status.result().ok()?;
        u32::try_from(version).ok().filter(|version| *version > 0)
    }
}

/// NVTX, the names that NVIDIA's profilers show.
#[cfg(feature = "nvtx")]
mod nvtx {
    use cudarc::nvtx::{result, sys};
    use std::ffi::CStr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicPtr, Ordering};

    type Domain = AtomicPtr<sys::nvtxDomainRegistration>;

    /// The crate's domain; `None` where the NVTX library does not load.
    fn domain() -> Option<sys::nvtxDomainHandle_t> {
        static DOMAIN: OnceLock<Option<Domain>> = OnceLock::new();
        let domain = DOMAIN.get_or_init(|| {
            if !is_present() {
                log::info!(
                    "no NVTX ranges: libnvToolsExt is not on the library path (docs/nsight.md)"
                );
                return None;
            }
            Some(AtomicPtr::new(result::domain_create("burn-cuda-graph")))
        });
        let domain = domain.as_ref()?;
        Some(domain.load(Ordering::Relaxed))
    }

    #[expect(unsafe_code)]
    pub(super) fn is_present() -> bool {
        // SAFETY: it only looks for the NVTX library, whose loading runs no code that depends on this process's state.
        unsafe { sys::is_culib_present() }
    }

    /// A range on the calling thread, ended when it drops. It does not leave that thread (a raw pointer is not `Send`),
    /// since ranges nest per thread.
    #[must_use]
    pub(crate) struct Range {
        domain: Option<sys::nvtxDomainHandle_t>,
    }

    impl Range {
        #[expect(unsafe_code)]
        pub fn new(name: &'static CStr, argb: u32) -> Self {
            let domain = domain();
            if let Some(domain) = domain {
                let attributes = sys::nvtxEventAttributes_t {
                    version: 3,
                    size: size_of::<sys::nvtxEventAttributes_t>() as u16,
                    category: 0,
                    colorType: sys::nvtxColorType_t::NVTX_COLOR_ARGB as i32,
                    color: argb,
                    payloadType: sys::nvtxPayloadType_t::NVTX_PAYLOAD_UNKNOWN as i32,
                    reserved0: 0,
                    payload: sys::nvtxEventAttributes_v2_payload_t { iValue: 0 },
                    messageType: sys::nvtxMessageType_t::NVTX_MESSAGE_TYPE_ASCII as i32,
                    message: sys::nvtxMessageValue_t {
                        ascii: name.as_ptr(),
                    },
                };
                // SAFETY: `domain` was created by `domain` above and is never destroyed; `attributes` is of the layout
                // that its version and size name, and its message is a C string that lives for ever.
                unsafe { result::domain_range_push(domain, &attributes) };
            }
            Self { domain }
        }

        /// End it here.
        pub fn end(self) {}
    }

    impl Drop for Range {
        #[expect(unsafe_code)]
        fn drop(&mut self) {
            if let Some(domain) = self.domain {
                // SAFETY: `domain` is never destroyed, and `new` pushed a range on this thread, which `Range` does not
                // leave.
                unsafe { result::domain_range_pop(domain) };
            }
        }
    }
}

#[cfg(feature = "cubecl-backend")]
mod device {
    use super::CaptureDriver;
    use burn::backend::{Backend, Dispatch, DispatchGraph};
    use burn::tensor::Device;

    /// The primitives of a Burn device, driven below autodiff.
    ///
    /// On an autodiff device the primitives are the defaults of a decorator that refuses to record, so the
    /// backward pass is captured through the inner device, whose stream it runs on.
    ///
    /// While a window is open, CUDA's device thread is in the relaxed capture mode: it serves other streams too, and what
    /// it does for them (waiting for an upload's staging, growing their pools) the global mode would refuse, spoiling
    /// both their work and the recording. What may not happen on the recording stream CubeCL refuses by itself.
    #[derive(Debug)]
    pub(crate) struct DeviceDriver {
        device: Device,
    }

    impl DeviceDriver {
        pub fn new(device: Device) -> Self {
            Self {
                device: device.inner(),
            }
        }

        #[cfg(feature = "cuda")]
        fn relax_device_thread(&self, relax: bool) {
            use cudarc::driver::sys::CUstreamCaptureMode as Mode;
            let mode = match relax {
                true => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
                false => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            };
            let burn::backend::DispatchDevice::Cube(device) = self.device.as_dispatch() else {
                return;
            };
            if matches!(device, burn_cubecl::CubeDevice::Cuda(_)) {
                let exchange = move || super::capture_mode::exchange(mode).is_some();
                let exchanged = device.client().exclusive(exchange);
                if !matches!(exchanged, Ok(true)) {
                    log::warn!("the device thread keeps its capture mode: {exchanged:?}");
                }
            }
        }

        #[cfg(not(feature = "cuda"))]
        fn relax_device_thread(&self, _relax: bool) {}
    }

    impl CaptureDriver for DeviceDriver {
        type Graph = SealedGraph;

        fn prepare(&self) -> Result<(), String> {
            Dispatch::graph_prepare(self.device.as_dispatch()).map_err(|err| err.to_string())
        }
        fn start(&self) -> Result<(), String> {
            self.relax_device_thread(true);
            let started = Dispatch::graph_start_capture(self.device.as_dispatch());
            if started.is_err() {
                self.relax_device_thread(false);
            }
            started.map_err(|err| err.to_string())
        }
        fn stop(&self) -> Result<SealedGraph, String> {
            let stopped = Dispatch::graph_stop_capture(self.device.as_dispatch());
            self.relax_device_thread(false);
            stopped
                .map(|graph| SealedGraph {
                    graph,
                    device: self.device.clone(),
                })
                .map_err(|err| err.to_string())
        }
    }

    /// A sealed recording of one step.
    ///
    /// It replays against the buffers that were recorded. CubeCL guards the pages of every one of them for as long
    /// as the graph lives, so none is handed to another allocation.
    #[derive(Debug)]
    pub(crate) struct SealedGraph {
        graph: DispatchGraph,
        device: Device,
    }

    impl SealedGraph {
        /// Enqueue one replay.
        ///
        /// `&mut Pool` is the engine's tensor pool: holding it exclusively is what keeps every other user of this
        /// graph's buffers away.
        #[expect(unsafe_code)]
        pub fn replay(&self, _pool: &mut crate::pool::Pool) -> Result<(), String> {
            // SAFETY:
            // - Liveness: `Command::guard_pages` in cubecl-server pins every page the recorded launches touched until
            //   this graph is destroyed, so each recorded address still belongs to the buffer it was recorded for.
            // - No concurrent use: the buffers a replay writes are the pool's static tensors, which never leave
            //   the engine (`GraphedStep::state` and outputs hand out duplicates), and intermediates that only this
            //   graph's guarded pages hold. `_pool` is borrowed exclusively, so no other graph of this step is
            //   being enqueued.
            // - Same stream: `GraphedStep::run` follows the calling thread's stream and drops its graphs when that is
            //   another than the one they were captured on, so the copies in and out, and the replay, which CubeCL
            //   enqueues on the stream its graph names, are issued on one stream.
            unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }
                .map_err(|err| err.to_string())
        }
    }

    impl SealedGraph {
        /// Enqueue one replay from the thread that runs a stream's operations, as one of them.
        #[expect(unsafe_code)]
        pub fn replay_here(&self) -> Result<(), String> {
            let DispatchGraph::Cube(graph) = &self.graph else {
                return Err("the graph is not one of CubeCL's".to_string());
            };
            let burn::backend::DispatchDevice::Cube(device) = self.device.as_dispatch() else {
                return Err("the device is not one of CubeCL's".to_string());
            };
            // SAFETY:
            // - Liveness: as in `replay`.
            // - No concurrent use: as in `replay`, but for `_pool`. What stands in for it is the queue: this is an
            //   operation of the stream that the graph was captured on. Its copies are enqueued by it, other graphs of the
            //   state by operations that a token ties to this one, in their order; and all else that works on the buffers
            //   is enqueued by a caller who waited for the queue to run empty.
            // - Same stream: operations run with their stream as the current one, and `GraphedStep` hands a replay over
            //   on the stream that its graph was captured on.
            unsafe { burn_cubecl::CubeBackend::graph_replay(device, graph) }
                .map_err(|err| err.to_string())
        }
    }

    /// CubeCL drops the metadata buffers that a graph had for itself along with it, also those that a rehearsal left for
    /// another window. There each would become an upload, which is replayed for ever.
    impl Drop for SealedGraph {
        fn drop(&mut self) {
            crate::pool::note_dropped_metadata();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A driver double with CubeCL's phases: it fails the test when a call comes out of order or a window is left
    /// open.
    #[derive(Default)]
    struct Scripted {
        phase: Cell<u8>,
        refuse: RefCell<Vec<&'static str>>,
        stops: Cell<u32>,
    }

    impl Scripted {
        fn refuses(&self, call: &'static str) -> bool {
            self.refuse.borrow().contains(&call)
        }
    }

    impl CaptureDriver for Scripted {
        type Graph = u32;
        fn prepare(&self) -> Result<(), String> {
            assert_eq!(self.phase.get(), 0, "prepared twice");
            if self.refuses("prepare") {
                return Err("prepare refused".into());
            }
            self.phase.set(1);
            Ok(())
        }
        fn start(&self) -> Result<(), String> {
            assert_eq!(self.phase.get(), 1, "opened unprepared");
            if self.refuses("start") {
                return Err("start refused".into());
            }
            self.phase.set(2);
            Ok(())
        }
        fn stop(&self) -> Result<u32, String> {
            self.stops.set(self.stops.get() + 1);
            let phase = self.phase.replace(0);
            match (phase, self.refuses("stop")) {
                (2, false) => Ok(7),
                (2, true) => Err("stop refused".into()),
                _ => Err("nothing was recording".into()),
            }
        }
    }

    /// Every path leaves the stream free, whatever is refused and whoever panics: a window left open would record
    /// every later launch of the process.
    #[test]
    fn every_path_closes_the_window() {
        let calls = ["prepare", "start", "stop"];
        for refused in 0..8u32 {
            for panics in [false, true] {
                let driver = Scripted::default();
                *driver.refuse.borrow_mut() = (0..3)
                    .filter(|bit| refused & (1 << bit) != 0)
                    .map(|bit| calls[bit as usize])
                    .collect();
                let result = catch_unwind(AssertUnwindSafe(|| -> Result<u32, String> {
                    let window = Prepared::new(&driver)?.open()?;
                    assert!(!panics, "scripted");
                    window.seal()
                }));
                assert_eq!(
                    driver.phase.get(),
                    0,
                    "refused {refused:03b}, panics {panics}"
                );
                match (refused, panics) {
                    (0, false) => assert_eq!(result.expect("no panic"), Ok(7)),
                    (_, false) => assert!(result.expect("no panic").is_err()),
                    (0 | 4, true) => assert!(result.is_err()),
                    _ => {}
                }
                assert!(driver.stops.get() <= 1);
            }
        }
    }

    /// A preparation that opens no window (the rehearsal) gives the stream back.
    #[test]
    fn a_rehearsal_gives_the_stream_back() {
        let driver = Scripted::default();
        drop(Prepared::new(&driver).expect("prepares"));
        assert_eq!((driver.phase.get(), driver.stops.get()), (0, 1));
        assert!(Prepared::new(&driver).is_ok());
    }

    /// A panic while the process's window lock is held does not lock later windows out.
    #[test]
    fn the_window_lock_survives_a_panic() {
        drop(catch_unwind(|| {
            let _held = exclusive().expect("free");
            panic!("inside a window");
        }));
        assert!(exclusive().is_some());
    }
}
