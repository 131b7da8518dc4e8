// Hopper's warpgroup instructions, for group_product.h: a group's 64 rows of results, of TILES tiles of 16 columns each, over 16 terms.
//
// An instruction names every register of its results, so there is one function for each number of tiles.
#pragma once

// How a left factor lies in shared memory, for products that read both factors from there.
enum class LeftStored {
    BY_ROW,   // a row holds a row of the factor
    BY_TERM,  // a row holds one term of the sums, for all 64 rows
};

#if ON_NVIDIA
#define RESULTS_OF(n)                                                               \
    "+f"(sum[n].at[0]), "+f"(sum[n].at[1]), "+f"(sum[n].at[2]), "+f"(sum[n].at[3]), \
        "+f"(sum[n].at[4]), "+f"(sum[n].at[5]), "+f"(sum[n].at[6]), "+f"(sum[n].at[7])
#define RESULTS_1 RESULTS_OF(0)
#define RESULTS_2 RESULTS_1, RESULTS_OF(1)
#define RESULTS_3 RESULTS_2, RESULTS_OF(2)
#define RESULTS_4 RESULTS_3, RESULTS_OF(3)
#define RESULTS_5 RESULTS_4, RESULTS_OF(4)
#define RESULTS_6 RESULTS_5, RESULTS_OF(5)
#define RESULTS_7 RESULTS_6, RESULTS_OF(6)
#define RESULTS_8 RESULTS_7, RESULTS_OF(7)
#define RESULTS_9 RESULTS_8, RESULTS_OF(8)
#define RESULTS_10 RESULTS_9, RESULTS_OF(9)
#define RESULTS_11 RESULTS_10, RESULTS_OF(10)
#define RESULTS_12 RESULTS_11, RESULTS_OF(11)
#define PLACES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_2 PLACES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_3 PLACES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PLACES_4 PLACES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_5 PLACES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_6 PLACES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_7 PLACES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PLACES_8 PLACES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_9 PLACES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PLACES_10 PLACES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PLACES_11 PLACES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PLACES_12 PLACES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"

// Macros for a number of tiles and of columns; A to G are the numbers of the operands behind the results. The first:
// sum (+)= left right, with the right factor at `descriptor`. BY_TERM reads it transposed. The second: both factors at
// descriptors.
#define MULTIPLY_GROUP(TILES, COLUMNS, A, B, C, D, E, F, G)                                                   \
    template <Stored STORED>                                                                                  \
    DEVICE void multiply_group(Accumulator (&sum)[TILES], const Factor& left, u64 descriptor, u32 adds) {     \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " F ", 0;\n"                                     \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" PLACES_##TILES "}, "    \
                     "{" A ", " B ", " C ", " D "}, " E ", adds, 1, 1, " G ";\n}"                              \
                     : RESULTS_##TILES                                                                        \
                     : "r"(left.pairs[0]), "r"(left.pairs[1]), "r"(left.pairs[2]), "r"(left.pairs[3]),        \
                       "l"(descriptor), "r"(adds), "n"(STORED == Stored::BY_TERM ? 1 : 0));                   \
    }                                                                                                         \
    template <LeftStored LEFT, Stored STORED>                                                                 \
    DEVICE void multiply_group(Accumulator (&sum)[TILES], u64 left, u64 right, u32 adds) {                    \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " C ", 0;\n"                                     \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" PLACES_##TILES "}, "    \
                     A ", " B ", adds, 1, 1, " D ", " E ";\n}"                                                 \
                     : RESULTS_##TILES                                                                        \
                     : "l"(left), "l"(right), "r"(adds), "n"(LEFT == LeftStored::BY_TERM ? 1 : 0),            \
                       "n"(STORED == Stored::BY_TERM ? 1 : 0));                                               \
    }
MULTIPLY_GROUP(1, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
MULTIPLY_GROUP(4, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
MULTIPLY_GROUP(5, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
MULTIPLY_GROUP(8, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
MULTIPLY_GROUP(10, "160", "%80", "%81", "%82", "%83", "%84", "%85", "%86")
MULTIPLY_GROUP(12, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
#undef MULTIPLY_GROUP
#endif
