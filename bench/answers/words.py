"""The words of our own tasks."""

from __future__ import annotations


def words(text: str, between: str = " ") -> list[str]:
    return text.replace("\n", between).strip(between).split(between)


ADJECTIVES = words("""
amber ancient azure bold brave bright broad calm clever copper coral crimson crisp curious dusty early eager faint fancy
fierce frozen gentle giant gilded golden grand green hidden hollow humble icy indigo ivory jolly keen large little lively
loud lucky mellow mighty misty modest narrow noble olive pale patient plain polished proud purple quick quiet rapid rare
rusty scarlet secret shiny silent silver slender small smooth steady stormy strong sunny swift tall tender tidy tiny velvet
violet warm wild wise wooden yellow young
""")
NOUNS = words("""
anchor arrow badge barrel basket beacon bell blanket bottle bridge bucket button candle canyon carpet castle chair circle
clock cloud compass corner cradle crystal curtain desert drum engine fabric falcon feather fence field forest fountain garden
gate glacier hammer harbor helmet hill island jacket kettle kite ladder lamp lantern lever library magnet market meadow
mirror mountain needle ocean paddle palace pebble pillar planet pocket portal prairie puzzle river rocket saddle shadow
shelter shield signal spring statue stone summit table temple thread ticket timber tower tunnel valley village wagon wheel
window
""")
PLACES = words("Lisbon Vienna Oslo Prague Dublin Madrid Athens Warsaw Helsinki Zurich Naples Bergen Porto Ghent Turin Riga")
REMARKS = (
    "The weather has been mild for the whole week.",
    "The train to the coast leaves at noon.",
    "My neighbour is painting the fence again.",
    "We had soup and fresh bread for dinner.",
    "The library closes earlier on Fridays.",
    "A new bakery opened around the corner.",
    "The children played in the park until dark.",
    "The old bridge will be repaired next spring.",
    "I read an article on the history of glass.",
    "The concert was better than everybody expected.",
    "The garden needs some water in the evening.",
    "They moved the meeting to the larger room.",
    "The cat slept on the warm windowsill.",
    "Our team won the match by a single goal.",
    "The museum shows maps of the last century.",
    "It may rain in the mountains tomorrow.",
)
CLASSES = {
    "animal": words(
        "a dog,a cat,a horse,a cow,a sheep,a lion,a tiger,a rabbit,a wolf,a bear,an elephant,a monkey,a mouse,a goat", ","
    ),
    "fruit": words(
        "an apple,a banana,a pear,an orange,a lemon,a peach,a plum,a cherry,a grape,a mango,a melon,a fig,a kiwi", ","
    ),
    "vehicle": words(
        "a car,a truck,a bus,a train,a bicycle,a tram,a ship,a boat,a van,a motorcycle,a taxi,a ferry,a tractor", ","
    ),
    "tool": words("a hammer,a saw,a drill,a wrench,a screwdriver,a chisel,an axe,a shovel,a rake,a file,pliers,a plane", ","),
    "instrument": words(
        "a piano,a violin,a guitar,a flute,a trumpet,a cello,a harp,a drum,a clarinet,an oboe,a banjo,a trombone", ","
    ),
    "profession": words("a doctor,a teacher,a lawyer,a baker,a nurse,a plumber,a farmer,a judge,a dentist,a pilot,a tailor", ","),
}
