//! A few rows of events, as a trace for Perfetto and as a picture.

use std::fmt::Write;

use serde_json::{Value, json};

/// Something that happened; times are microseconds from the start of its step.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What, in full.
    pub name: String,
    /// When it began.
    pub start_us: f64,
    /// How long it took; `None` for an instant.
    pub duration_us: Option<f64>,
}

impl Event {
    /// One that took a while.
    pub fn span(name: impl Into<String>, start_us: f64, end_us: f64) -> Self {
        Self {
            name: name.into(),
            start_us,
            duration_us: Some((end_us - start_us).max(0.0)),
        }
    }

    /// One that took no time worth showing.
    pub fn instant(name: impl Into<String>, at_us: f64) -> Self {
        Self {
            name: name.into(),
            start_us: at_us,
            duration_us: None,
        }
    }

    fn end_us(&self) -> f64 {
        self.start_us + self.duration_us.unwrap_or(0.0)
    }
}

/// Events of one kind, e.g. the launches of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What its events are.
    pub name: String,
    /// In any order.
    pub events: Vec<Event>,
}

/// One step: rows on a common clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// E.g. `eager`.
    pub name: String,
    /// From top to bottom.
    pub rows: Vec<Row>,
}

impl Step {
    /// When its last event ended.
    pub fn end_us(&self) -> f64 {
        let events = self.rows.iter().flat_map(|row| &row.events);
        events.map(Event::end_us).fold(0.0, f64::max)
    }
}

/// Steps side by side, each from zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// What was measured, on what.
    pub title: String,
    /// What it must not be read as.
    pub note: String,
    /// From top to bottom.
    pub steps: Vec<Step>,
}

impl Timeline {
    /// As a Chrome trace (the JSON object format): open it in <https://ui.perfetto.dev> or `chrome://tracing`.
    ///
    /// Each step is a process there and each row a thread.
    pub fn chrome_trace(&self) -> Value {
        let mut events = Vec::new();
        for (process, step) in self.steps.iter().enumerate() {
            let pid = process + 1;
            events.push(
                json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": step.name}}),
            );
            events.push(json!({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}));
            for (thread, row) in step.rows.iter().enumerate() {
                let tid = thread + 1;
                events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row.name}}));
                events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}));
                for event in &row.events {
                    let mut value = json!({"name": event.name, "cat": row.name, "pid": pid, "tid": tid, "ts": event.start_us});
                    match event.duration_us {
                        Some(duration) => {
                            value["ph"] = json!("X");
                            value["dur"] = json!(duration);
                        }
                        None => {
                            value["ph"] = json!("i");
                            value["s"] = json!("t");
                        }
                    }
                    events.push(value);
                }
            }
        }
        json!({
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {"title": self.title, "note": self.note},
        })
    }

    /// As a picture: all steps on one scale.
    pub fn svg(&self) -> String {
        let longest = self.steps.iter().map(Step::end_us).fold(1.0, f64::max);
        let x = |us: f64| LEFT + us / longest * (WIDTH - LEFT - RIGHT);
        let mut body = String::new();
        let text = |x: f64, y: f64, class: &str, content: &str| {
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>\n",
                escape(content)
            )
        };
        body += &text(MARGIN, 24.0, "title", &self.title);
        let mut y = 44.0;
        for step in &self.steps {
            let heading = format!("{}: {}", step.name, duration_text(step.end_us()));
            body += &text(MARGIN, y + 12.0, "step", &heading);
            y += 20.0;
            for (index, row) in step.rows.iter().enumerate() {
                body += &text(MARGIN, y + 15.0, "row", &row.name);
                let colour = COLOURS[index % COLOURS.len()];
                for event in &row.events {
                    let (left, right) = (x(event.start_us), x(event.end_us()));
                    // Wide enough to be seen.
                    let width = (right - left).max(0.6);
                    // A formatter into a string does not fail.
                    let _ = writeln!(
                        body,
                        "<rect x=\"{left:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"20\" fill=\"{colour}\"><title>{}</title></rect>",
                        escape(&event.name)
                    );
                    if width > 7.0 * event.name.chars().count() as f64 {
                        body += &text(left + 4.0, y + 14.0, "event", &event.name);
                    }
                }
                y += 26.0;
            }
            y += 12.0;
        }
        for part in 0..=4 {
            let us = longest * f64::from(part) / 4.0;
            body += &text(x(us) - 20.0, y + 4.0, "row", &duration_text(us));
        }
        y += 24.0;
        body += &text(MARGIN, y, "row", &self.note);
        let height = y + 16.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" font-family=\"sans-serif\">\n\
             <style>.title{{font-size:15px;font-weight:bold}}.step{{font-size:13px;font-weight:bold}}\
             .row{{font-size:11px;fill:#555}}.event{{font-size:11px;fill:#fff}}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n"
        )
    }
}

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 12.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 40.0;
const COLOURS: [&str; 3] = ["#4478aa", "#d08030", "#40a060"];

fn duration_text(us: f64) -> String {
    match us < 1000.0 {
        true => format!("{us:.0} us"),
        false => format!("{:.2} ms", us / 1e3),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_timeline() -> Timeline {
        Timeline {
            title: "MLP on a card".into(),
            note: "one step each".into(),
            steps: vec![
                Step {
                    name: "eager".into(),
                    rows: vec![
                        Row {
                            name: "host".into(),
                            events: vec![Event::span("forward", 0.0, 1500.0)],
                        },
                        Row {
                            name: "launches".into(),
                            events: vec![Event::instant("Matmul<f32, \"x\">", 100.0)],
                        },
                    ],
                },
                Step {
                    name: "replayed".into(),
                    rows: vec![Row {
                        name: "host".into(),
                        events: vec![Event::span("run", 0.0, 200.0)],
                    }],
                },
            ],
        }
    }

    /// Perfetto rejects nothing: it shows a wrong event nowhere.
    #[test]
    fn the_trace_has_what_the_format_asks_of_each_event() {
        let trace = a_timeline().chrome_trace();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        assert_eq!((of("X"), of("i")), (2, 1));
        assert_eq!(of("M"), 2 * 2 + 3 * 2, "names of processes and threads");
        for event in events.iter().filter(|event| event["ph"] != "M") {
            assert!(event["ts"].is_f64() && event["pid"].is_u64() && event["tid"].is_u64());
            assert_eq!(event["ph"] == "X", event["dur"].is_f64());
        }
    }

    #[test]
    fn both_steps_share_one_scale_and_names_are_escaped() {
        let svg = a_timeline().svg();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("<title>Matmul&lt;f32, &quot;x&quot;&gt;</title>"));
        assert!(svg.contains("eager: 1.50 ms") && svg.contains("replayed: 200 us"));
        let width = |name: &str| {
            let end = svg.find(&format!("<title>{name}</title>")).unwrap();
            let attribute = svg[..end].rfind("width=\"").unwrap() + 7;
            let digits: String = svg[attribute..].chars().take_while(|c| *c != '"').collect();
            digits.parse::<f64>().unwrap()
        };
        let ratio = width("forward") / width("run");
        assert!((ratio - 7.5).abs() < 0.01, "{ratio}");
    }

    #[test]
    fn an_event_that_ends_before_it_begins_takes_no_time() {
        assert_eq!(Event::span("odd", 5.0, 3.0).duration_us, Some(0.0));
    }
}
