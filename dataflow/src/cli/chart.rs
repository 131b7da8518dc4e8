//! Charts of lines over logarithmic axes, as SVG and as PNG.
//!
//! The font is part of the program, so that a picture looks the same everywhere and no library of the system's is needed.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontDesc, register_font};

use super::output::check_replaceable;

/// The name that the font is known by, in SVG too: a viewer without the first takes the second.
const FONT: &str = "DejaVu Sans, sans-serif";
const INK: RGBColor = RGBColor(34, 34, 34);
const GRID: RGBColor = RGBColor(221, 221, 221);
const COLORS: [RGBColor; 4] =
    [RGBColor(0, 102, 170), RGBColor(204, 85, 0), RGBColor(17, 119, 51), RGBColor(136, 34, 85)];

/// Width of one chart and height of a picture.
const SIZE: [u32; 2] = [600, 500];
/// The most batch sizes, or other values of x, that are written below a chart.
const X_LABELS: f64 = 14.0;

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
    pub y_name: String,
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

/// A path whose ending says how to draw, of no file that is another thing.
pub(crate) fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match ending(&path) {
        Some(_) => match check_replaceable(&path, &[b"<svg", b"\x89PNG"], "a picture") {
            Ok(()) => Ok(path),
            Err(error) => Err(error.to_string()),
        },
        None => Err("expected a name that ends in .svg or .png".to_owned()),
    }
}

/// Draws `charts` beside each other into `path`, whose ending [`parse_path`] has seen.
pub(crate) fn draw(title: &str, charts: &[Chart], path: &Path) -> anyhow::Result<()> {
    register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("reading the font failed"))?;
    let bytes = match ending(path) {
        Some(Ending::Png) => png(title, charts)?,
        Some(Ending::Svg) | None => svg(title, charts)?.into_bytes(),
    };
    std::fs::write(path, bytes).with_context(|| format!("writing {} failed", path.display()))
}

fn svg(title: &str, charts: &[Chart]) -> anyhow::Result<String> {
    let canvas = Canvas { pixels: 1, raised: 0 };
    let mut text = String::new();
    let backend = SVGBackend::with_string(&mut text, canvas.size(charts));
    canvas.picture(&backend.into_drawing_area(), title, charts)?;
    Ok(text)
}

fn png(title: &str, charts: &[Chart]) -> anyhow::Result<Vec<u8>> {
    // Twice as fine as a screen, for printing and for screens of small pixels.
    let canvas = Canvas { pixels: 2, raised: 7 };
    let (width, height) = canvas.size(charts);
    let mut colors = vec![0; 3 * (width * height) as usize];
    let backend = BitMapBackend::with_buffer(&mut colors, (width, height));
    canvas.picture(&backend.into_drawing_area(), title, charts)?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header()?.write_image_data(&colors)?;
    Ok(bytes)
}

/// Draws with lengths that are given in units of some pixels each.
#[derive(Clone, Copy)]
struct Canvas {
    pixels: u32,
    /// How many pixels too high labels come out: plotters takes an outline's height for that of its letters.
    raised: i32,
}

impl Canvas {
    fn size(self, charts: &[Chart]) -> (u32, u32) {
        (SIZE[0] * charts.len() as u32 * self.pixels, SIZE[1] * self.pixels)
    }

    /// Letters as high as `height` between two lines of them.
    fn font(self, height: u32) -> TextStyle<'static> {
        FontDesc::from((FONT, height * self.pixels)).color(&INK)
    }

    fn picture<D>(
        self,
        root: &DrawingArea<D, Shift>,
        title: &str,
        charts: &[Chart],
    ) -> anyhow::Result<()>
    where
        D: DrawingBackend,
        D::ErrorType: 'static,
    {
        root.fill(&WHITE)?;
        let root = root.margin(8 * self.pixels, 0, 0, 0);
        let below = root.titled(title, self.font(21))?;
        for (area, chart) in below.split_evenly((1, charts.len())).iter().zip(charts) {
            self.chart(area, chart)?;
        }
        Ok(root.present()?)
    }

    fn chart<D>(self, area: &DrawingArea<D, Shift>, chart: &Chart) -> anyhow::Result<()>
    where
        D: DrawingBackend,
        D::ErrorType: 'static,
    {
        let Self { pixels, raised } = self;
        let [x, y] = [chart.range(0), chart.range(1)];
        // Room above the lines for their names.
        let ([left, right], [lower, upper]) = ([x[0] / 1.1, x[1] * 1.1], [y[0] / 1.4, y[1] * 2.5]);
        let mut context = ChartBuilder::on(area)
            .caption(&chart.title, self.font(18))
            .margin(10 * pixels)
            .margin_right(18 * pixels)
            .x_label_area_size(46 * pixels)
            .y_label_area_size(64 * pixels)
            .build_cartesian_2d(
                (left..right).log_scale().with_key_points(chart.x_ticks([left, right])),
                (lower..upper).log_scale().with_key_points(ticks([lower, upper])),
            )?;
        context
            .configure_mesh()
            .axis_style(INK.stroke_width(pixels))
            .bold_line_style(GRID.stroke_width(pixels))
            .label_style(self.font(15))
            .axis_desc_style(self.font(16))
            .set_all_tick_mark_size(6 * pixels)
            .y_label_offset(raised)
            .x_label_formatter(&f64::to_string)
            .y_label_formatter(&f64::to_string)
            .x_desc(&chart.x_name)
            .y_desc(&chart.y_name)
            .draw()?;
        for (series, color) in chart.series.iter().zip(COLORS.into_iter().cycle()) {
            let style = color.filled().stroke_width(2 * pixels);
            let points = series.points.iter().map(|&[x, y]| (x, y));
            let length = 24 * pixels as i32;
            let line =
                move |(x, y)| PathElement::new([(x, y - raised), (x + length, y - raised)], style);
            context
                .draw_series(LineSeries::new(points, style).point_size(4 * pixels))?
                .label(&series.name)
                .legend(line);
        }
        context
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .margin(10 * pixels)
            .legend_area_size(30 * pixels)
            .background_style(WHITE)
            .border_style(GRID.stroke_width(pixels))
            .label_font(self.font(16))
            .draw()?;
        Ok(())
    }
}

impl Chart {
    fn values(&self, axis: usize) -> impl Iterator<Item = f64> {
        self.series.iter().flat_map(|series| &series.points).map(move |point| point[axis])
    }

    /// Least and largest.
    fn range(&self, axis: usize) -> [f64; 2] {
        let low = self.values(axis).reduce(f64::min).unwrap_or(1.0);
        [low, self.values(axis).reduce(f64::max).unwrap_or(2.0)]
    }

    /// The values of x, without those that are too close to the one before to be read.
    fn x_ticks(&self, [left, right]: [f64; 2]) -> Vec<f64> {
        let apart = (right / left).powf(1.0 / X_LABELS);
        let mut ticks: Vec<f64> = self.values(0).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup_by(|next, kept| *next < *kept * apart);
        ticks
    }
}

/// One, two and five times powers of ten inside of a range.
pub(crate) fn ticks([low, high]: [f64; 2]) -> Vec<f64> {
    let exponents = (low.log10().floor() as i32)..=(high.log10().floor() as i32);
    let tick = |exponent: i32| {
        // Below 1, powers are divided by, which is exact where it can be.
        let power = 10_f64.powi(exponent.abs());
        [1.0, 2.0, 5.0].map(|step| if exponent < 0 { step / power } else { step * power })
    };
    exponents.flat_map(tick).filter(|tick| (low..=high).contains(tick)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charts() -> [Chart; 2] {
        let line = |name: &str, points: &[[f64; 2]]| Series {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let chart = |title: &str, series| Chart {
            title: title.to_owned(),
            x_name: "prompts <at once>".to_owned(),
            y_name: "seconds".to_owned(),
            series,
        };
        let rising = line("a & b", &[[1.0, 0.3], [8.0, 9.0], [64.0, 700.0]]);
        let falling = line("c", &[[1.0, 200.0], [8.0, 20.0]]);
        [chart("both", vec![rising, falling]), chart("neither", vec![line("none", &[])])]
    }

    fn attribute<'a>(element: &'a str, name: &str) -> &'a str {
        element.split_once(&format!(" {name}=\"")).unwrap().1.split_once('"').unwrap().0
    }

    /// The dots of an SVG: x, y and color.
    fn dots(text: &str) -> Vec<(f64, f64, &str)> {
        let number = |element, name| attribute(element, name).parse().unwrap();
        let circles = text.lines().filter(|line| line.starts_with("<circle"));
        let dot = |circle| (number(circle, "cx"), number(circle, "cy"), attribute(circle, "fill"));
        circles.map(dot).collect()
    }

    fn drawn(name: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = parse_path(folder.path().join(name).to_str().unwrap()).unwrap();
        draw("title", &charts(), &path).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn ticks_are_round_numbers_inside() {
        assert_eq!(ticks([0.15, 3.0]), [0.2, 0.5, 1.0, 2.0]);
        assert_eq!(ticks([7.0, 120.0]), [10.0, 20.0, 50.0, 100.0]);
    }

    #[test]
    fn sizes_are_ticks_where_they_can_be_read() {
        let [chart, _] = charts();
        assert_eq!(chart.x_ticks([0.9, 70.0]), [1.0, 8.0, 64.0]);
        assert_eq!(chart.x_ticks([1e-40, 1e40]), [1.0]);
    }

    #[test]
    fn svg_has_every_point_line_and_word() {
        let text = String::from_utf8(drawn("p.svg")).unwrap();
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        let words = ["title", "both", "a &amp; b", "c", "none", "neither", "seconds"];
        for word in words.into_iter().chain(["prompts &lt;at once&gt;", "1", "8", "64", "500"]) {
            assert!(text.lines().any(|line| line == word), "{word} is not in {text}");
        }
        let [blue, red] = ["#0066AA", "#CC5500"];
        let dots = dots(&text);
        let colors: Vec<&str> = dots.iter().map(|dot| dot.2).collect();
        assert_eq!(colors, [blue, blue, blue, red, red]);
        let [across, down] = [|dot: &(f64, f64, &str)| dot.0, |dot: &(f64, f64, &str)| dot.1];
        let x: Vec<f64> = dots.iter().map(across).collect();
        assert!((x[1] - x[0] - (x[2] - x[1])).abs() <= 1.0 && x[0] < x[1], "{x:?}");
        assert_eq!((x[0], x[1]), (x[3], x[4]));
        let y: Vec<f64> = dots.iter().map(down).collect();
        assert!(y[0] > y[1] && y[1] > y[2] && y[4] > y[3], "up is more: {y:?}");
        for (color, points) in [(blue, &dots[..3]), (red, &dots[3..])] {
            let joined: String = points.iter().map(|dot| format!("{},{} ", dot.0, dot.1)).collect();
            let stroke =
                |line: &&str| line.contains("<polyline") && attribute(line, "stroke") == color;
            let lines: Vec<&str> =
                text.lines().filter(stroke).map(|line| attribute(line, "points")).collect();
            assert!(lines.contains(&&*joined), "{lines:?}");
        }
    }

    #[test]
    fn png_has_every_point_where_svg_has_it() {
        let text = String::from_utf8(drawn("p.svg")).unwrap();
        let bytes = drawn("p.png");
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut colors = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut colors).unwrap();
        assert_eq!((frame.width, frame.height), (2400, 1000));
        let nearest = |x: usize, y: usize| {
            let at = 3 * (y * 2400 + x);
            let distance = |color: &RGBColor| {
                let channels = [color.0, color.1, color.2];
                channels.iter().zip(&colors[at..]).map(|(a, b)| a.abs_diff(*b)).max()
            };
            let RGBColor(red, green, blue) =
                [INK, GRID, WHITE].into_iter().chain(COLORS).min_by_key(distance).unwrap();
            format!("#{red:02X}{green:02X}{blue:02X}")
        };
        let dots = dots(&text);
        assert_eq!(dots.len(), 5);
        for (x, y, color) in dots {
            let [x, y] = [x, y].map(|place| 2 * place as usize);
            let height = |x| (y - 32..=y + 32).filter(|&y| nearest(x, y) == color).count();
            let height = (x - 8..=x + 8).map(height).max().unwrap();
            assert!((13..=18).contains(&height), "{x} {y}: a dot, not a line of {height} pixels");
        }
    }

    #[test]
    fn files_that_cannot_be_written_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(draw("t", &charts(), &folder.path().join("none/p.png")).is_err());
        assert!(parse_path("p.jpg").is_err() && parse_path("svg").is_err());
    }
}
