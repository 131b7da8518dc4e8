//! A chart of lines over steps, as SVG inside of a page: once with a linear and once with a logarithmic axis; the page shows one of
//! them.
//!
//! Colors are classes, so that one style sheet serves light and dark. Each run has a number, and its lines and marks the classes
//! `run<number>`, by which it is shown or hidden, and `c<color>`.

use std::fmt::{self, Write};

use super::escape::Escaped;
use super::past::{Mark, MarkKind};
use super::scale::{Scale, Spacing, short};
use super::series::Point;

/// Different colors of runs.
pub(super) const COLORS: usize = 8;

/// The picture, and the part of it that lines are in.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 708.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 268.0;

/// Lines of more points have no dots.
const MOST_DOTS: usize = 60;

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stroke {
    Solid,
    Dashed,
    /// Straight to the next step, then up or down.
    Stairs,
}

/// A line of a chart.
#[derive(Debug)]
pub(super) struct Line {
    /// The run's number.
    pub run: usize,
    /// Names of the values and of the run.
    pub label: String,
    pub points: Vec<Point>,
    pub stroke: Stroke,
}

/// A chart.
#[derive(Debug)]
pub(super) struct Chart<'a> {
    pub title: String,
    /// The last step of all charts of a page.
    pub last_step: u64,
    pub lines: Vec<Line>,
    /// Kills and resumes of each run.
    pub marks: &'a [Vec<Mark>],
}

impl Chart<'_> {
    /// Writes the chart as a figure.
    ///
    /// # Errors
    /// The errors of `page`.
    pub fn write(&self, page: &mut String) -> fmt::Result {
        let title = Escaped(&self.title);
        writeln!(page, "<figure class=\"chart\"><figcaption>{title}</figcaption>")?;
        let steps =
            Scale { spacing: Spacing::Linear, low: 0.0, high: self.last_step.max(1) as f64 };
        write!(page, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\" ")?;
        writeln!(
            page,
            "data-steps=\"{}\" data-box=\"{LEFT} {RIGHT} {TOP} {BOTTOM}\">",
            steps.high
        )?;
        for tick in steps.ticks() {
            let x = across(&steps, tick);
            write!(
                page,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\" />"
            )?;
            writeln!(
                page,
                "<text class=\"x\" x=\"{x:.1}\" y=\"{}\">{}</text>",
                BOTTOM + 16.0,
                short(tick)
            )?;
        }
        let middle = (LEFT + RIGHT) / 2.0;
        writeln!(
            page,
            "<text class=\"x name\" x=\"{middle}\" y=\"{}\">steps</text>",
            HEIGHT - 3.0
        )?;
        for (run, marks) in self.marks.iter().enumerate() {
            if self.lines.iter().any(|line| line.run == run) {
                write_marks(page, run, marks, &steps)?;
            }
        }
        for (spacing, class) in [(Spacing::Linear, "linear"), (Spacing::Logarithmic, "logarithmic")]
        {
            let values = self.lines.iter().flat_map(|line| &line.points).map(|point| point.value);
            let scale = Scale::around(spacing, values);
            let Scale { low, high, .. } = scale;
            writeln!(page, "<g class=\"{class}\" data-low=\"{low}\" data-high=\"{high}\">")?;
            for tick in scale.ticks() {
                let Some(y) = down(&scale, tick) else { continue };
                write!(
                    page,
                    "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\" />"
                )?;
                let (x, y) = (LEFT - 6.0, y + 4.0);
                writeln!(page, "<text class=\"y\" x=\"{x}\" y=\"{y:.1}\">{}</text>", short(tick))?;
            }
            for line in &self.lines {
                line.write(page, &steps, &scale)?;
            }
            writeln!(page, "</g>")?;
        }
        write!(page, "<rect class=\"frame\" x=\"{LEFT}\" y=\"{TOP}\" ")?;
        writeln!(page, "width=\"{}\" height=\"{}\" />", RIGHT - LEFT, BOTTOM - TOP)?;
        writeln!(page, "<line class=\"cursor\" x1=\"0\" x2=\"0\" y1=\"{TOP}\" y2=\"{BOTTOM}\" />")?;
        writeln!(page, "</svg><div class=\"hover\"></div></figure>")
    }
}

impl Line {
    fn write(&self, page: &mut String, steps: &Scale, scale: &Scale) -> fmt::Result {
        let places: Vec<(f64, f64)> = self
            .points
            .iter()
            .filter_map(|point| Some((across(steps, point.step as f64), down(scale, point.value)?)))
            .collect();
        let Self { run, label, .. } = self;
        let color = run % COLORS;
        let stroke = match self.stroke {
            Stroke::Solid | Stroke::Stairs => "solid",
            Stroke::Dashed => "dashed",
        };
        write!(page, "<g class=\"run{run} c{color}\"><polyline class=\"{stroke}\" ")?;
        write!(page, "data-label=\"{}\" points=\"", Escaped(label))?;
        for (index, (x, y)) in places.iter().enumerate() {
            if index > 0 {
                page.push(' ');
                if self.stroke == Stroke::Stairs {
                    write!(page, "{x:.1},{:.2} ", places[index - 1].1)?;
                }
            }
            write!(page, "{x:.1},{y:.2}")?;
        }
        page.push_str("\" />");
        if places.len() <= MOST_DOTS && self.stroke != Stroke::Stairs {
            for (x, y) in &places {
                write!(page, "<circle cx=\"{x:.1}\" cy=\"{y:.2}\" r=\"3\" />")?;
            }
        }
        writeln!(page, "</g>")
    }
}

fn write_marks(page: &mut String, run: usize, marks: &[Mark], steps: &Scale) -> fmt::Result {
    let color = run % COLORS;
    for Mark { step, kind, again, text } in marks {
        let x = across(steps, *step as f64);
        let (class, sign) = match kind {
            MarkKind::Killed => ("killed", "\u{2715}"),
            MarkKind::Resumed => ("resumed", "\u{25b8}"),
        };
        write!(page, "<g class=\"mark {class} run{run} c{color}\">")?;
        write!(page, "<title>{}</title>", Escaped(text))?;
        if *again > 0 {
            let width = across(steps, step.saturating_add(*again) as f64) - x;
            let height = BOTTOM - TOP;
            write!(
                page,
                "<rect x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\" />"
            )?;
        }
        write!(page, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\" />")?;
        writeln!(page, "<text x=\"{x:.1}\" y=\"{}\">{sign}</text></g>", TOP - 4.0)?;
    }
    Ok(())
}

fn across(steps: &Scale, step: f64) -> f64 {
    // A kill may have been at a step that no line of metrics has.
    LEFT + steps.place(step).unwrap_or(0.0).clamp(0.0, 1.0) * (RIGHT - LEFT)
}

fn down(scale: &Scale, value: f64) -> Option<f64> {
    scale.place(value).map(|place| BOTTOM - place * (BOTTOM - TOP))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(stroke: Stroke, values: &[f64]) -> String {
        let mut marks = vec![Vec::new(); 10];
        marks[9] = vec![
            Mark { step: 4, kind: MarkKind::Killed, again: 0, text: "killed <here>".to_owned() },
            Mark { step: 2, kind: MarkKind::Resumed, again: 2, text: "resumed".to_owned() },
        ];
        let points = (0..).zip(values).map(|(step, &value)| Point { step, value }).collect();
        let line = |points| Line { run: 9, label: "a & b".to_owned(), points, stroke };
        let lines = vec![line(points), line(Vec::new())];
        let mut page = String::new();
        let title = "<loss>".to_owned();
        Chart { title, last_step: 4, lines, marks: &marks }.write(&mut page).unwrap();
        page
    }

    #[test]
    fn a_chart_has_points_and_marks_at_their_places() {
        let page = drawn(Stroke::Solid, &[0.0, 5.0, 10.0]);
        // 0 to 10, with a margin above.
        let y = |value: f64| BOTTOM - value / 10.4 * (BOTTOM - TOP);
        let points =
            format!("points=\"58.0,{:.2} 220.5,{:.2} 383.0,{:.2}\"", y(0.0), y(5.0), y(10.0));
        assert!(page.contains(&points), "{points}: {page}");
        assert_eq!(page.matches("class=\"mark killed run9 c1\"").count(), 1, "once a run: {page}");
        assert!(page.contains("<title>killed &lt;here&gt;</title><line x1=\"708.0\""), "{page}");
        // Steps 3 and 4 were done again.
        let again = "<rect x=\"383.0\" y=\"16\" width=\"325.0\"";
        assert!(page.contains(&format!("<title>resumed</title>{again}")), "{page}");
        assert!(page.contains("data-label=\"a &amp; b\"") && page.contains("&lt;loss&gt;"));
    }

    #[test]
    fn what_has_no_logarithm_is_left_out_there_alone() {
        let page = drawn(Stroke::Solid, &[0.0, 1.0, 10.0]);
        let (linear, logarithmic) = page.split_once("class=\"logarithmic\"").unwrap();
        assert_eq!(
            (linear.matches("<circle").count(), logarithmic.matches("<circle").count()),
            (3, 2)
        );
    }

    #[test]
    fn stairs_keep_a_value_until_the_next() {
        let page = drawn(Stroke::Stairs, &[2.0, 2.0, 4.0]);
        let points = page.split_once("points=\"").unwrap().1.split_once('"').unwrap().0;
        let points: Vec<&str> = points.split(' ').collect();
        let y = |index: usize| points[index].split_once(',').unwrap().1;
        assert_eq!(points.len(), 5);
        assert!(y(2) == y(3) && y(3) != y(4), "{points:?}");
    }
}
