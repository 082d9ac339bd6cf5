//! What can be told without opening a device.

use std::path::{Path, PathBuf};

use burn_cuda_graph::{CudaLibraries, cuda_libraries};
use burn_cuda_graph_suite::device::DeviceChoice;
use burn_cuda_graph_suite::doctor::{
    Finding, cuda_version_text, driver_version, files_named, library_folders, toolkit_version,
};
use burn_cuda_graph_suite::warm_start;

/// The oldest CUDA version of a driver that the project was run with counts as 13.0; this is where doubts begin.
const OLDEST_LIKELY: u32 = 12_000;

pub fn look(choice: DeviceChoice, findings: &mut Vec<Finding>) {
    features(choice, findings);
    match cuda_libraries() {
        Some(libraries) => cuda(choice, libraries, findings),
        None => without_cuda(findings),
    }
    cache(findings);
    threads(findings);
}

fn features(choice: DeviceChoice, findings: &mut Vec<Finding>) {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("flex", cfg!(feature = "flex")),
        ("nvtx", cfg!(feature = "nvtx")),
    ];
    let on: Vec<&str> = all
        .iter()
        .filter(|(_, on)| *on)
        .map(|(name, _)| *name)
        .collect();
    let found = format!("built with {}", on.join(", "));
    let missing = match choice {
        DeviceChoice::Cuda => !cfg!(feature = "cuda"),
        DeviceChoice::Wgpu => !cfg!(feature = "wgpu"),
        DeviceChoice::Cpu => !cfg!(feature = "flex"),
        DeviceChoice::Auto => on.is_empty(),
    };
    findings.push(match missing {
        true => Finding::fail(
            "features",
            format!("{found}, which the chosen device is not among"),
            "build with --features cuda, wgpu or flex",
        ),
        false => Finding::ok("features", found),
    });
}

/// An NVIDIA card that this build cannot use is worth a word.
fn without_cuda(findings: &mut Vec<Finding>) {
    if Path::new("/dev/nvidiactl").exists() {
        findings.push(Finding::warning(
            "driver",
            "there is an NVIDIA driver, and this build does not use it",
            "build with --features cuda",
        ));
    } else {
        findings.push(Finding::ok(
            "driver",
            "not looked for: the feature `cuda` is off, which hardware graphs need",
        ));
    }
}

fn cuda(choice: DeviceChoice, libraries: CudaLibraries, findings: &mut Vec<Finding>) {
    // Without it the automatic choice goes on to the next device.
    let missing = match choice {
        DeviceChoice::Cuda => Finding::fail,
        _ => |what: &str, found: String, remedy: String| Finding::warning(what, found, remedy),
    };
    let kernel_module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = driver_version(&kernel_module).unwrap_or("of unknown version");
    match (libraries.driver, libraries.cuda_version) {
        (false, _) if kernel_module.is_empty() => findings.push(missing(
            "driver",
            "no NVIDIA driver".to_string(),
            "on a machine with an NVIDIA card install its driver (nvidia-smi then lists the card)".to_string(),
        )),
        (false, _) => findings.push(missing(
            "driver",
            format!("the kernel module {version} is loaded, libcuda.so is not on the library path"),
            "in a container: start it with --gpus all and the NVIDIA container toolkit; else install the driver's \
             user-space part (libcuda1, libnvidia-compute)"
                .to_string(),
        )),
        (true, None) => findings.push(missing(
            "driver",
            "libcuda.so loads and does not know its version: a stub, or no driver behind it".to_string(),
            "take stubs/ of the toolkit out of LD_LIBRARY_PATH, and install the driver".to_string(),
        )),
        (true, Some(cuda)) => {
            let found = format!("{version}, for CUDA up to {}", cuda_version_text(cuda));
            findings.push(match cuda < OLDEST_LIKELY {
                true => Finding::warning(
                    "driver",
                    found,
                    "older than any that this was run with (580, CUDA 13.0): update it if a later line fails",
                ),
                false => Finding::ok("driver", found),
            });
        }
    }
    toolkit(findings);
    findings.push(match libraries.nvtx {
        None => Finding::ok("nvtx", "off: the feature `nvtx` is not built in"),
        Some(true) => Finding::ok(
            "nvtx",
            "libnvToolsExt loads: Nsight Systems shows the ranges",
        ),
        Some(false) => Finding::warning(
            "nvtx",
            "libnvToolsExt is not on the library path: no ranges in Nsight Systems",
            "docs/nsight.md: CUDA 12 has it, CUDA 13 has it under another name",
        ),
    });
}

/// Nothing at run time needs the toolkit: CubeCL 0.11 compiles kernels with the LLVM that is linked in.
fn toolkit(findings: &mut Vec<Finding>) {
    let named = ["CUDA_PATH", "CUDA_HOME"]
        .into_iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from);
    let usual = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
    let toolkit = named.chain(usual).find(|folder| folder.is_dir());
    let version = toolkit.as_deref().and_then(|folder| {
        toolkit_version(&std::fs::read_to_string(folder.join("version.json")).ok()?)
    });
    let listed = std::env::var("LD_LIBRARY_PATH").ok();
    let folders = library_folders(listed.as_deref(), toolkit.as_deref());
    let nvrtc = files_named(&folders, "libnvrtc.so");
    let toolkit = match (&toolkit, version) {
        (Some(folder), Some(version)) => format!("{version} in {}", folder.display()),
        (Some(folder), None) => format!("of unknown version in {}", folder.display()),
        (None, _) => "none".to_string(),
    };
    let nvrtc = nvrtc
        .first()
        .map_or("none".to_string(), |file| file.display().to_string());
    findings.push(Finding::ok(
        "toolkit",
        format!("{toolkit}; NVRTC: {nvrtc}. Neither is needed: kernels are compiled by the LLVM that is linked in"),
    ));
}

fn cache(findings: &mut Vec<Finding>) {
    let Some(cache) = warm_start::cache() else {
        findings.push(Finding::ok(
            "cache",
            "none: no backend of this build tunes kernels",
        ));
        return;
    };
    let mut found = cache.to_string();
    if let Some(age_s) = cache.age_s {
        found += &format!(", written {}", age_text(age_s));
    }
    for (device, choices) in &cache.choices {
        found += &format!("; {device}: {choices}");
    }
    findings.push(match (cache.writable, cache.is_cold()) {
        (false, _) => Finding::warning(
            "cache",
            found,
            "make its folder writable, or name another in cubecl.toml: [environment] path = { directory = \"...\" }",
        ),
        (true, true) => Finding::warning(
            "cache",
            found,
            "nothing to do; a filled one can be brought along: docs/warm-start.md",
        ),
        (true, false) => Finding::ok("cache", found),
    });
    findings.push(match cache.keeps_kernels {
        true => Finding::ok("kernels", format!("kept: {}", cache.kernels)),
        false => Finding::ok(
            "kernels",
            "compiled anew in each process; cubecl.toml: [compilation] cache = true keeps them",
        ),
    });
}

fn age_text(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7_200 => format!("{} min ago", seconds / 60),
        7_200..172_800 => format!("{} h ago", seconds / 3_600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn threads(findings: &mut Vec<Finding>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let found = format!("{cores} cores for this process");
    findings.push(match cores < 2 {
        true => Finding::warning(
            "threads",
            found,
            "CubeCL's device thread and the training loop share one: give the process two",
        ),
        false => Finding::ok(
            "threads",
            format!(
                "{found}; run a GraphedStep on the thread that made it, and call tolerate_captures() on others that use \
                 the device"
            ),
        ),
    });
}
