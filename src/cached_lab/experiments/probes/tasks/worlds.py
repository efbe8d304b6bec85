"""Little worlds in which persons go about with things: stories like those of bAbI's tasks 1 to 5, told without files.

Each story is a list of facts of four words, a question of at most four, and an answer of one; every answer that fits
the question is as likely as every other, since names are drawn alike. Bystanders do the same things with other things.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from random import Random

from .stories import Story

PERSONS, BYSTANDERS = ("bill", "fred", "jeff", "mary"), ("anna", "carl", "dora", "emil")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OTHER_PLACES = ("attic", "cellar", "garage", "porch")
OBJECTS, OTHER_OBJECTS = ("apple", "football", "milk"), ("book", "coat", "lamp")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
VERBS = ("went", "took", "dropped", "gave", "of")
ASKING = ("where", "before", "what", "who")
END = "."
WORDS = (*PERSONS, *BYSTANDERS, *PLACES, *OTHER_PLACES, *OBJECTS, *OTHER_OBJECTS, *OPPOSITE, *VERBS, *ASKING, END)
WIDTH = 4
"""Words of a fact."""


@dataclass
class _Visit:
    """Where an object was, and the fact that brought it there, or its holder."""

    place: str
    fact: int


@dataclass
class _World:
    """Persons, where they are, and what became of each object."""

    random: Random
    facts: list[list[str]] = field(default_factory=list)
    at: dict[str, _Visit] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    handled: dict[str, list[int]] = field(default_factory=dict)
    visits: dict[str, list[_Visit]] = field(default_factory=dict)
    gifts: list[tuple[int, tuple[str, str, str]]] = field(default_factory=list)

    def move(self) -> bool:
        """Somebody goes to another place, with all that he or she holds."""
        person = self.random.choice(PERSONS)
        now = self.at[person].place if person in self.at else None
        place = self.random.choice([place for place in PLACES if place != now])
        self.at[person] = _Visit(place, len(self.facts))
        for thing, holder in self.holder.items():
            if holder == person:
                self.visits[thing].append(self.at[person])
        self.facts.append([person, "went", place, END])
        return True

    def take(self) -> bool:
        """Somebody takes what nobody holds, and what was dropped where he or she is."""
        free = [
            (person, thing)
            for person in self.at
            for thing in OBJECTS
            if thing not in self.holder
            and (thing not in self.visits or self.visits[thing][-1].place == self.at[person].place)
        ]
        if not free:
            return False
        person, thing = self.random.choice(free)
        self.holder[thing], self.handled[thing] = person, [len(self.facts)]
        self.visits.setdefault(thing, [self.at[person]])
        self.facts.append([person, "took", thing, END])
        return True

    def drop(self) -> bool:
        """Somebody drops a thing."""
        if not self.holder:
            return False
        thing = self.random.choice(sorted(self.holder))
        self.handled[thing].append(len(self.facts))
        self.facts.append([self.holder.pop(thing), "dropped", thing, END])
        return True

    def give(self) -> bool:
        """Somebody gives a thing to somebody, who takes it up where it is."""
        if not self.holder:
            return False
        thing = self.random.choice(sorted(self.holder))
        giver = self.holder[thing]
        other = self.random.choice([person for person in PERSONS if person != giver])
        self.holder[thing] = other
        self.gifts.append((len(self.facts), (giver, thing, other)))
        self.facts.append([giver, "gave", thing, other])
        return True

    def hand_out(self) -> bool:
        """Somebody takes a thing, wherever both are; in stories where places do not matter."""
        free = [thing for thing in OBJECTS if thing not in self.holder]
        if not free:
            return False
        person, thing = self.random.choice(PERSONS), self.random.choice(free)
        self.holder[thing], self.visits[thing] = person, []
        self.facts.append([person, "took", thing, END])
        return True


def _played(random: Random, count: int, acts: list[Callable[[_World], bool]]) -> _World:
    """A world after so many facts; what cannot be done is not tried twice."""
    world = _World(random)
    while len(world.facts) < count:
        random.choice(acts)(world)
    return world


def _one_fact(random: Random, count: int) -> Story | None:
    world = _played(random, count, [_World.move])
    person = random.choice(sorted(world.at))
    return Story(world.facts, ["where", person], world.at[person].place, [world.at[person].fact])


def _two_facts(random: Random, count: int) -> Story | None:
    world = _played(random, count, [_World.move, _World.move, _World.take, _World.drop])
    if not world.visits:
        return None
    thing = random.choice(sorted(world.visits))
    last = world.visits[thing][-1]
    return Story(world.facts, ["where", thing], last.place, sorted({*world.handled[thing], last.fact}))


def _three_facts(random: Random, count: int) -> Story | None:
    world = _played(random, count, [_World.move, _World.move, _World.take, _World.drop])
    asked = []
    for thing, visits in sorted(world.visits.items()):
        last = {visit.place: index for index, visit in enumerate(visits)}  # of a place the last visit
        asked += [(thing, index) for index in last.values() if index]
    if not asked:
        return None
    thing, index = random.choice(asked)
    before, then = world.visits[thing][index - 1 : index + 1]
    support = sorted({*world.handled[thing], before.fact, then.fact})
    return Story(world.facts, ["where", thing, "before", then.place], before.place, support)


def _two_arguments(random: Random, count: int) -> Story | None:
    line, way = random.sample(PLACES, 3), random.choice(sorted(OPPOSITE))
    pairs = [(line[0], line[1]), (line[1], line[2])]  # the first is that way of the second
    facts = [random.choice([[a, way, "of", b], [b, OPPOSITE[way], "of", a]]) for a, b in pairs]
    asked = random.randrange(2)
    a, b = pairs[asked]
    question, answer = random.choice(
        [
            (["what", way, "of", b], a),
            ([a, way, "of", "what"], b),
            (["what", OPPOSITE[way], "of", a], b),
            ([b, OPPOSITE[way], "of", "what"], a),
        ]
    )
    if random.random() < 0.5:
        return Story(facts, question, answer, [asked])
    return Story(facts[::-1], question, answer, [1 - asked])


def _three_arguments(random: Random, count: int) -> Story | None:
    world = _played(random, count, [_World.hand_out, _World.give, _World.give, _World.move])
    if not world.gifts:
        return None
    _, gift = random.choice(world.gifts)
    unknown = random.randrange(3)
    # The last gift of which all but the unknown is the same.
    fact, told = [g for g in world.gifts if all(i == unknown or g[1][i] == gift[i] for i in range(3))][-1]
    giver, thing, other = (("who", "what", "who")[i] if i == unknown else word for i, word in enumerate(gift))
    return Story(world.facts, [giver, "gave", thing, other], told[unknown], [fact])


@dataclass(frozen=True)
class Kind:
    """One kind of story.

    Attributes:
        tell: a story of so many facts, or None if nothing can be asked of the one that was drawn.
        least: facts. most: facts of a story with nothing said about it.
        choices: answers that fit a question, each as likely.
        step: of the numbers of facts.
    """

    tell: Callable[[Random, int], Story | None]
    least: int
    most: int
    choices: int
    step: int = 1


KINDS = {
    "qa1": Kind(_one_fact, 2, 4, len(PLACES), 2),
    "qa2": Kind(_two_facts, 2, 6, len(PLACES)),
    "qa3": Kind(_three_facts, 4, 8, len(PLACES) - 1),
    "qa4": Kind(_two_arguments, 2, 2, len(PLACES) - 1),
    "qa5": Kind(_three_arguments, 2, 6, len(PERSONS) - 1),
}
"""By the names of bAbI's tasks. A person gives one of three things to one of three others: three answers each time."""


def tell(question: str, most: int, random: Random) -> Story:
    """A story of at most so many facts."""
    kind = KINDS[question]
    count = random.randrange(kind.least, most + 1, kind.step)
    story = None
    while story is None:
        story = kind.tell(random, count)
    return story


def gossip(question: str) -> list[list[str]]:
    """All sentences of the same kind about bystanders and other things."""
    if question == "qa4":
        return [[one, way, "of", other] for one, other in permutations(OTHER_PLACES, 2) for way in OPPOSITE]
    said = [[who, "went", place, END] for who in BYSTANDERS for place in PLACES]
    if question in ("qa2", "qa3"):
        said += [[who, did, thing, END] for who in BYSTANDERS for did in ("took", "dropped") for thing in OTHER_OBJECTS]
    if question == "qa5":
        said += [[who, "gave", thing, other] for who, other in permutations(BYSTANDERS, 2) for thing in OTHER_OBJECTS]
    return said
