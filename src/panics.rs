//! Turns a panic of code we call into an error with its message.
//!
//! Opening a device and downloading a data set panic where they fail, on whichever thread does the work; a program that
//! wants to try the next device, or to end with one clear message, has to catch that.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};

/// One catcher at a time: the panic hook is global.
static HOOK: Mutex<()> = Mutex::new(());

/// Runs `f`; a panic becomes `Err` with the first panic message, and nothing is printed.
///
/// While `f` runs, panics of unrelated threads are not printed either.
pub(crate) fn catch<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let _one_at_a_time = HOOK.lock().unwrap_or_else(PoisonError::into_inner);
    // The first message is the cause: a device opens on a thread of its own, and what reaches the caller is often only
    // that this thread went away.
    let first = Arc::new(Mutex::new(None));
    let previous = panic::take_hook();
    panic::set_hook(Box::new({
        let first = first.clone();
        move |info| {
            let message = info
                .payload_as_str()
                .unwrap_or("panic without a message")
                .to_string();
            first
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(message);
        }
    }));
    let outcome = panic::catch_unwind(AssertUnwindSafe(f));
    panic::set_hook(previous);
    outcome.map_err(|_| {
        first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .unwrap_or_else(|| "panic without a message".to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::catch;

    #[test]
    fn a_panic_on_another_thread_gives_its_own_message() {
        let outcome = catch(|| {
            let cause = std::thread::spawn(|| panic!("no driver")).join();
            assert!(cause.is_ok(), "the device thread went away");
        });
        assert_eq!(outcome, Err("no driver".to_string()));
    }

    #[test]
    fn without_a_panic_the_value_comes_through() {
        assert_eq!(catch(|| 7), Ok(7));
    }
}
