//! Charts of lines over logarithmic axes, as SVG and as PNG.
//!
//! A chart is first laid out as a list of [`Shape`]s, which both kinds of files are then made of. The font is part of the
//! program, so that a picture looks the same everywhere and no library of the system's is needed.

mod png;
mod svg;

use std::path::{Path, PathBuf};

use anyhow::Context;

/// A color, red, green and blue.
pub(crate) type Color = [u8; 3];

const INK: Color = [34, 34, 34];
const GRID: Color = [221, 221, 221];
const COLORS: [Color; 4] = [[0, 102, 170], [204, 85, 0], [17, 119, 51], [136, 34, 85]];

/// Pixels of one chart.
const CHART: [f64; 2] = [600.0, 460.0];
/// Pixels above the first chart, for the title of all.
const HEADING: f64 = 40.0;
/// Pixels left of, above, right of and below the lines of a chart.
const MARGINS: [f64; 4] = [70.0, 40.0, 20.0, 50.0];
/// Pixels of letters.
const LETTERS: f64 = 13.0;

/// Where text stands from its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// What pictures are made of; places are pixels from the upper left.
#[derive(Clone, Debug)]
enum Shape {
    Line {
        from: [f64; 2],
        to: [f64; 2],
        width: f64,
        color: Color,
    },
    Dot {
        at: [f64; 2],
        radius: f64,
        color: Color,
    },
    /// `at` is on the line that letters stand on.
    Text {
        at: [f64; 2],
        size: f64,
        anchor: Anchor,
        words: String,
    },
}

/// Shapes on white.
struct Picture {
    width: f64,
    height: f64,
    shapes: Vec<Shape>,
}

/// One line of a chart.
pub(crate) struct Series {
    pub name: String,
    /// Both coordinates above 0.
    pub points: Vec<[f64; 2]>,
}

/// One chart of a picture.
pub(crate) struct Chart {
    pub title: String,
    pub x_name: String,
    pub series: Vec<Series>,
}

/// How a picture is written.
#[derive(Clone, Copy)]
enum Ending {
    Svg,
    Png,
}

fn ending(path: &Path) -> Option<Ending> {
    match path.extension()?.to_str()? {
        "svg" => Some(Ending::Svg),
        "png" => Some(Ending::Png),
        _ => None,
    }
}

/// A path whose ending says how to draw.
pub(crate) fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match ending(&path) {
        Some(_) => Ok(path),
        None => Err("expected a name that ends in .svg or .png".to_owned()),
    }
}

/// Draws `charts` beside each other into `path`, whose ending [`parse_path`] has seen.
pub(crate) fn draw(title: &str, charts: &[Chart], path: &Path) -> anyhow::Result<()> {
    let picture = lay_out(title, charts);
    let bytes = match ending(path) {
        Some(Ending::Png) => png::encode(&picture)?,
        Some(Ending::Svg) | None => svg::encode(&picture).into_bytes(),
    };
    std::fs::write(path, bytes).with_context(|| format!("writing {} failed", path.display()))
}

fn lay_out(title: &str, charts: &[Chart]) -> Picture {
    let width = CHART[0] * charts.len() as f64;
    let heading = Shape::Text {
        at: [width / 2.0, HEADING - 12.0],
        size: 17.0,
        anchor: Anchor::Middle,
        words: title.to_owned(),
    };
    let mut shapes = vec![heading];
    for (index, chart) in charts.iter().enumerate() {
        let plot = Plot::new(chart, CHART[0] * index as f64);
        plot.axes(chart, &mut shapes);
        plot.lines(chart, &mut shapes);
    }
    Picture { width, height: HEADING + CHART[1], shapes }
}

/// Where the points of one chart lie.
struct Plot {
    /// Least and largest of x, then of y.
    ranges: [[f64; 2]; 2],
    /// Left and right, then lower and upper edge.
    edges: [[f64; 2]; 2],
}

impl Plot {
    fn new(chart: &Chart, left: f64) -> Self {
        let range = |axis: usize| {
            let values = chart.series.iter().flat_map(|series| &series.points);
            let [low, high] = values.fold([f64::MAX, f64::MIN], |[low, high], point| {
                [low.min(point[axis]), high.max(point[axis])]
            });
            if low > high { [1.0, 2.0] } else { [low, high] }
        };
        let [x, y] = [range(0), range(1)];
        let [before, above, after, below] = MARGINS;
        Self {
            // Room above the lines for their names.
            ranges: [[x[0] / 1.1, x[1] * 1.1], [y[0] / 1.4, y[1] * 2.5]],
            edges: [
                [left + before, left + CHART[0] - after],
                [HEADING + CHART[1] - below, HEADING + above],
            ],
        }
    }

    fn place(&self, axis: usize, value: f64) -> f64 {
        let [low, high] = self.ranges[axis];
        let [from, to] = self.edges[axis];
        from + (to - from) * (value / low).ln() / (high / low).ln()
    }

    fn axes(&self, chart: &Chart, shapes: &mut Vec<Shape>) {
        let [[left, right], [lower, upper]] = self.edges;
        let line = |from, to, color| Shape::Line { from, to, width: 1.0, color };
        let text = |at, anchor, words| Shape::Text { at, size: LETTERS, anchor, words };
        for tick in ticks(self.ranges[0], &[1.0, 2.0, 4.0, 8.0], 16.0) {
            let x = self.place(0, tick);
            shapes.push(line([x, lower], [x, upper], GRID));
            shapes.push(text([x, lower + 18.0], Anchor::Middle, tick.to_string()));
        }
        for tick in ticks(self.ranges[1], &[1.0, 2.0, 5.0], 10.0) {
            let y = self.place(1, tick);
            shapes.push(line([left, y], [right, y], GRID));
            shapes.push(text([left - 8.0, y + 4.0], Anchor::End, tick.to_string()));
        }
        shapes.push(line([left, lower], [right, lower], INK));
        shapes.push(line([left, lower], [left, upper], INK));
        let middle = (left + right) / 2.0;
        shapes.push(text([middle, lower + 38.0], Anchor::Middle, chart.x_name.clone()));
        let at = [middle, upper - 12.0];
        let words = chart.title.clone();
        shapes.push(Shape::Text { at, size: 15.0, anchor: Anchor::Middle, words });
    }

    fn lines(&self, chart: &Chart, shapes: &mut Vec<Shape>) {
        let [left, upper] = [self.edges[0][0], self.edges[1][1]];
        for (index, (series, color)) in chart.series.iter().zip(COLORS).enumerate() {
            let points = series.points.iter().map(|[x, y]| [self.place(0, *x), self.place(1, *y)]);
            let points: Vec<[f64; 2]> = points.collect();
            for pair in points.windows(2) {
                shapes.push(Shape::Line { from: pair[0], to: pair[1], width: 2.0, color });
            }
            shapes.extend(points.iter().map(|&at| Shape::Dot { at, radius: 3.5, color }));
            let y = upper + 16.0 + 20.0 * index as f64;
            let [from, to] = [[left + 12.0, y - 4.0], [left + 36.0, y - 4.0]];
            shapes.push(Shape::Line { from, to, width: 2.0, color });
            let (at, words) = ([left + 44.0, y], series.name.clone());
            shapes.push(Shape::Text { at, size: LETTERS, anchor: Anchor::Start, words });
        }
    }
}

/// `steps` times powers of `base` inside of `range`.
fn ticks([low, high]: [f64; 2], steps: &[f64], base: f64) -> Vec<f64> {
    let exponents = (low.log(base).floor() as i32)..=(high.log(base).floor() as i32);
    let tick = |exponent: i32| {
        // Below 1, powers are divided by, which is exact where it can be.
        let power = base.powi(exponent.abs());
        let scaled = move |step: &f64| if exponent < 0 { step / power } else { step * power };
        steps.iter().map(scaled).collect::<Vec<_>>()
    };
    exponents.flat_map(tick).filter(|tick| (low..=high).contains(tick)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charts() -> [Chart; 1] {
        let line = |name: &str, points: &[[f64; 2]]| Series {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        [Chart {
            title: "seconds".to_owned(),
            x_name: "prompts <at once>".to_owned(),
            series: vec![line("a & b", &[[1.0, 0.3], [128.0, 700.0]]), line("none", &[])],
        }]
    }

    #[test]
    fn ticks_are_round_numbers_inside() {
        assert_eq!(
            ticks([0.9, 140.0], &[1.0, 2.0, 4.0, 8.0], 16.0),
            [1., 2., 4., 8., 16., 32., 64., 128.]
        );
        assert_eq!(ticks([0.15, 3.0], &[1.0, 2.0, 5.0], 10.0), [0.2, 0.5, 1.0, 2.0]);
    }

    #[test]
    fn a_picture_is_whole_in_both_kinds() {
        let folder = tempfile::tempdir().unwrap();
        let [svg, png] = ["p.svg", "p.png"]
            .map(|name| parse_path(folder.path().join(name).to_str().unwrap()).unwrap());
        draw("title", &charts(), &svg).unwrap();
        let text = std::fs::read_to_string(&svg).unwrap();
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        for part in [">title<", ">a &amp; b<", ">prompts &lt;at once&gt;<", ">128<", "<circle"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        draw("title", &charts(), &png).unwrap();
        let bytes = std::fs::read(&png).unwrap();
        assert!(
            bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.ends_with(b"IEND\xae\x42\x60\x82")
        );
        assert_eq!(bytes[16..24], [0, 0, 2, 88, 0, 0, 1, 244], "600 by 500");
        assert!(draw("t", &charts(), &folder.path().join("none/p.png")).is_err());
        assert!(parse_path("p.jpg").is_err() && parse_path("svg").is_err());
    }
}
