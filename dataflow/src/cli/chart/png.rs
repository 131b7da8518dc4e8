//! A picture as PNG (W3C, 2003): shapes are filled by the share of each pixel that they cover.

use std::io::Write;

use ab_glyph::{Font, FontRef, Glyph, PxScale, ScaleFont, point};
use ab_glyph_rasterizer::Rasterizer;
use anyhow::Context;
use flate2::Compression;
use flate2::Crc;
use flate2::write::ZlibEncoder;

use super::{Anchor, Color, INK, Picture, Shape};

/// Corners of what is drawn as a circle.
const CORNERS: usize = 24;

/// The picture as bytes.
pub(super) fn encode(picture: &Picture) -> anyhow::Result<Vec<u8>> {
    let font =
        FontRef::try_from_slice(dejavu::sans::regular()).context("reading the font failed")?;
    let (width, height) = (picture.width.ceil() as usize, picture.height.ceil() as usize);
    let mut canvas = Canvas { width, height, pixels: vec![255; 3 * width * height] };
    for shape in &picture.shapes {
        match shape {
            Shape::Line { from, to, width, color } => canvas.line(*from, *to, *width, *color),
            Shape::Dot { at, radius, color } => canvas.dot(*at, *radius, *color),
            Shape::Text { at, size, anchor, words } => {
                canvas.text(&font, *at, *size as f32, *anchor, words);
            }
        }
    }
    canvas.encode()
}

struct Canvas {
    width: usize,
    height: usize,
    /// Red, green and blue of every pixel, by rows.
    pixels: Vec<u8>,
}

impl Canvas {
    /// Lays `color` over a pixel that is covered to a share of `coverage`.
    fn blend(&mut self, x: i64, y: i64, coverage: f32, color: Color) {
        let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) else { return };
        if x >= self.width || y >= self.height {
            return;
        }
        let coverage = coverage.clamp(0.0, 1.0);
        let pixel = &mut self.pixels[3 * (y * self.width + x)..][..3];
        for (under, over) in pixel.iter_mut().zip(color) {
            let mixed = f32::from(*under) * (1.0 - coverage) + f32::from(over) * coverage;
            *under = mixed.round() as u8;
        }
    }

    fn polygon(&mut self, corners: &[[f64; 2]], color: Color) {
        let extreme = |axis: usize, least: fn(f64, f64) -> f64| {
            corners.iter().map(|corner| corner[axis]).reduce(least).unwrap_or(0.0)
        };
        let [left, upper] = [0, 1].map(|axis| extreme(axis, f64::min).floor());
        let [right, lower] = [0, 1].map(|axis| extreme(axis, f64::max).ceil());
        let size = [right - left, lower - upper].map(|size| size as usize + 1);
        let mut rasterizer = Rasterizer::new(size[0], size[1]);
        let corner =
            |[x, y]: [f64; 2]| ab_glyph_rasterizer::point((x - left) as f32, (y - upper) as f32);
        for (index, &from) in corners.iter().enumerate() {
            rasterizer.draw_line(corner(from), corner(corners[(index + 1) % corners.len()]));
        }
        rasterizer.for_each_pixel_2d(|x, y, coverage| {
            self.blend(left as i64 + i64::from(x), upper as i64 + i64::from(y), coverage, color);
        });
    }

    fn line(&mut self, from: [f64; 2], to: [f64; 2], width: f64, color: Color) {
        let (dx, dy) = (to[0] - from[0], to[1] - from[1]);
        let length = dx.hypot(dy);
        if length > 0.0 {
            let [x, y] = [-dy / length * width / 2.0, dx / length * width / 2.0];
            let corners = [
                [from[0] + x, from[1] + y],
                [to[0] + x, to[1] + y],
                [to[0] - x, to[1] - y],
                [from[0] - x, from[1] - y],
            ];
            self.polygon(&corners, color);
        }
    }

    fn dot(&mut self, at: [f64; 2], radius: f64, color: Color) {
        let corner = |index: usize| {
            let (sine, cosine) = (std::f64::consts::TAU * index as f64 / CORNERS as f64).sin_cos();
            [at[0] + radius * cosine, at[1] + radius * sine]
        };
        let corners: Vec<[f64; 2]> = (0..CORNERS).map(corner).collect();
        self.polygon(&corners, color);
    }

    fn text(&mut self, font: &FontRef<'_>, at: [f64; 2], size: f32, anchor: Anchor, words: &str) {
        // Letters of a font are lower than what it calls its height.
        let scale =
            PxScale::from(size * font.height_unscaled() / font.units_per_em().unwrap_or(1.0));
        let scaled = font.as_scaled(scale);
        let glyphs: Vec<_> = words.chars().map(|letter| scaled.glyph_id(letter)).collect();
        let advance: f32 = glyphs.iter().map(|&glyph| scaled.h_advance(glyph)).sum();
        let mut x = at[0] as f32
            - match anchor {
                Anchor::Start => 0.0,
                Anchor::Middle => advance / 2.0,
                Anchor::End => advance,
            };
        for id in glyphs {
            let glyph = Glyph { id, scale, position: point(x, at[1] as f32) };
            x += scaled.h_advance(id);
            if let Some(outline) = font.outline_glyph(glyph) {
                let first = outline.px_bounds().min;
                outline.draw(|column, row, coverage| {
                    let [x, y] =
                        [first.x as i64 + i64::from(column), first.y as i64 + i64::from(row)];
                    self.blend(x, y, coverage, INK);
                });
            }
        }
    }

    fn encode(&self) -> anyhow::Result<Vec<u8>> {
        let mut rows = ZlibEncoder::new(Vec::new(), Compression::best());
        for row in self.pixels.chunks_exact(3 * self.width) {
            // Every row begins with how it was filtered: not at all.
            rows.write_all(&[0])?;
            rows.write_all(row)?;
        }
        let mut header = [self.width as u32, self.height as u32].map(u32::to_be_bytes).concat();
        // Bits of a color, colors of red, green and blue, and the only compression, filters and order that there are.
        header.extend([8, 2, 0, 0, 0]);
        let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
        write_chunk(&mut bytes, b"IHDR", &header);
        write_chunk(&mut bytes, b"IDAT", &rows.finish()?);
        write_chunk(&mut bytes, b"IEND", &[]);
        Ok(bytes)
    }
}

fn write_chunk(out: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    let mut sum = Crc::new();
    sum.update(kind);
    sum.update(data);
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(kind);
    out.extend(data);
    out.extend(sum.sum().to_be_bytes());
}
