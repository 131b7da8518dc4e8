//! A picture as SVG.

use std::fmt::Write;

use super::{Anchor, Color, Picture, Shape};

/// The picture as text.
pub(super) fn encode(picture: &Picture) -> String {
    let Picture { width, height, shapes } = picture;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"DejaVu Sans, sans-serif\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for shape in shapes {
        // Writing to a string does not fail.
        let _ = write_shape(&mut text, shape);
    }
    text.push_str("</svg>\n");
    text
}

fn write_shape(out: &mut String, shape: &Shape) -> std::fmt::Result {
    match shape {
        Shape::Line { from: [x1, y1], to: [x2, y2], width, color } => writeln!(
            out,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{}\" stroke-width=\"{width}\"/>",
            hex(*color)
        ),
        Shape::Dot { at: [x, y], radius, color } => {
            writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>",
                hex(*color)
            )
        }
        Shape::Text { at: [x, y], size, anchor, words } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{words}</text>"
            )
        }
    }
}

fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}
