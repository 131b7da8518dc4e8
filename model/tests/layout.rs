//! Properties of every family's layout, tested with a Mamba: segments, uses, a tied head, initial
//! values that other blocks do not change; and the names and shapes of Mamba's tensors.
//! `bodies/transformers.rs` compares those of the other families with files of transformers. No
//! device is needed.

use tidemill_kernels::Cpu;
use tidemill_model::{Decay, LanguageModel, MambaConfig};

/// 13 tokens, 5 wide, 2 blocks, 3 states, 3 taps, 15 channels, rank 2.
fn odd_config() -> MambaConfig {
    MambaConfig { d_state: 3, d_conv: 3, expand: 3, dt_rank: 2, ..MambaConfig::new(13, 5, 2) }
}

#[test]
fn tensors_have_the_names_and_shapes_of_hugging_face_files() {
    let mut config = odd_config();
    config.tie_embeddings = false;
    let model = LanguageModel::<Cpu>::new(&config).expect("an odd model");
    let layout = model.layout();
    let segments: Vec<_> = layout.segments().iter().map(|segment| &segment.name[..]).collect();
    assert_eq!(segments, ["embedding", "blocks.0", "blocks.1", "norm_f", "lm_head"]);
    assert_eq!(layout.blocks(), ["embedding", "blocks.0", "blocks.1", "head"]);
    let uses: Vec<_> = layout.uses().iter().map(|slot| (slot.block, slot.segment)).collect();
    assert_eq!(uses, [(0, 0), (1, 1), (2, 2), (3, 3), (3, 4)]);
    let mixer: [(&str, &[usize], Decay); 10] = [
        ("norm.weight", &[5], Decay::Exempt),
        ("mixer.in_proj.weight", &[30, 5], Decay::Decayed),
        ("mixer.conv1d.weight", &[15, 1, 3], Decay::Decayed),
        ("mixer.conv1d.bias", &[15], Decay::Exempt),
        ("mixer.x_proj.weight", &[8, 15], Decay::Decayed),
        ("mixer.dt_proj.weight", &[15, 2], Decay::Decayed),
        ("mixer.dt_proj.bias", &[15], Decay::Exempt),
        ("mixer.A_log", &[15, 3], Decay::Exempt),
        ("mixer.D", &[15], Decay::Exempt),
        ("mixer.out_proj.weight", &[5, 15], Decay::Decayed),
    ];
    let table: &[usize] = &[13, 5];
    let mut expected = vec![("backbone.embeddings.weight".to_owned(), table, Decay::Decayed)];
    for layer in 0..2 {
        expected.extend(
            mixer.map(|(name, shape, decay)| {
                (format!("backbone.layers.{layer}.{name}"), shape, decay)
            }),
        );
    }
    expected.push(("backbone.norm_f.weight".to_owned(), &[5], Decay::Exempt));
    expected.push(("lm_head.weight".to_owned(), table, Decay::Decayed));
    let found: Vec<_> = layout
        .tensors()
        .iter()
        .map(|tensor| (tensor.name.clone(), &tensor.shape[..], tensor.decay))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn a_tied_head_uses_the_embedding_table_once_more() {
    let model = LanguageModel::<Cpu>::new(&odd_config()).expect("an odd model");
    let uses: Vec<_> =
        model.layout().uses().iter().map(|slot| (slot.block, slot.segment)).collect();
    assert_eq!(uses, [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0)]);
}

#[test]
fn other_blocks_do_not_change_the_initial_values_of_a_block() {
    let [short, long] = [1, 2].map(|blocks| {
        let model = LanguageModel::<Cpu>::new(&MambaConfig::new(13, 8, blocks)).expect("a model");
        let tensor = model.layout().tensors()[2].clone();
        assert_eq!(tensor.name, "backbone.layers.0.mixer.in_proj.weight");
        model.initialize(3)[tensor.range()].to_vec()
    });
    assert_eq!(short, long);
    assert!(short.iter().all(|x| x.abs() <= 8.0_f32.sqrt().recip()));
}
