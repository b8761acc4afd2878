// The order of backward items: every tile of every pair once, sections one after another, tiles before heads.
#include <set>
#include <utility>

#include "check.h"
#include "hopper/backward/item_order.cuh"

using namespace flash::hopper;

namespace {

void check_every_item_once(int n_tiles, int pairs, int section_heads) {
    std::set<std::pair<int, int>> seen;
    int last_section = 0, last_tile = 0, last_pair = -1;
    for (int number = 0; number < n_tiles * pairs; ++number) {
        const ItemPlace place = ordered_item(number, n_tiles, pairs, section_heads);
        CHECK(0 <= place.tile && place.tile < n_tiles);
        CHECK(0 <= place.pair && place.pair < pairs);
        CHECK(seen.emplace(place.tile, place.pair).second);
        const int section = place.pair / section_heads;
        CHECK(section == last_section || section == last_section + 1);
        if (section == last_section) {
            CHECK(place.tile >= last_tile);
            if (place.tile == last_tile) CHECK(place.pair == last_pair + 1);
        } else {
            CHECK(place.tile == 0);
        }
        last_section = section;
        last_tile = place.tile;
        last_pair = place.pair;
    }
    CHECK(static_cast<int>(seen.size()) == n_tiles * pairs);
}

}  // namespace

int main() {
    for (const int n_tiles : {1, 2, 7, 32}) {
        for (const int pairs : {1, 3, 16, 33}) {
            for (const int section_heads : {1, 2, 16}) {
                if (section_heads <= pairs) check_every_item_once(n_tiles, pairs, section_heads);
            }
        }
    }
    return report();
}
