{#-
    Windowed Deduplicator in SQL, over the rows of one relation: the batch is the window. `past` extends the window to
    rows that an earlier batch wrote.

    `row_number()` over a key alone, or ordered by a constant, keeps an arbitrary row: another one after each retry.
    Here `order_by` orders the rows, and `content` (by default the whole row) breaks ties. A row whose `order_by` is
    NULL, NaN or infinite is kept only if no row of the key has a value, both for `first` and for `last`.

    Spark sorts and compares no maps and no variants, so in `content` they count by their JSON. The columns of a CTE or
    of a name are not known when the macro is rendered: there the whole row counts by its JSON.

    Rows without a key are not repeats of each other: they fail the statement, or `windowed_deduplicator_null_keys`
    selects them. In a key column that is declared nullable, NULL equals NULL.
-#}

{% macro windowed_deduplicator(
    relation, key=none, order_by=none, keep='first', nullable_key=none, on_null_key='fail', past=none,
    content=none
) %}
    {{ return(adapter.dispatch('windowed_deduplicator', 'lakehouse_patterns')(
        relation, key, order_by, keep, nullable_key, on_null_key, past, content
    )) }}
{% endmacro %}

{% macro default__windowed_deduplicator(relation, key, order_by, keep, nullable_key, on_null_key, past, content) %}
    {%- if key is none -%}
        {%- do lakehouse_patterns.require(
            not (order_by or nullable_key or past),
            'without a key all columns are compared: order_by, nullable_key and past belong to a key'
        ) -%}
        {%- set whole = lakehouse_patterns._deduplicator_content(relation, none) -%}
        {%- if not whole.is_text and whole.expression == 'struct(*)' -%}
select distinct *
from {{ relation }}
        {%- else -%}
select * except (lakehouse_patterns_content, lakehouse_patterns_rank)
from (
    select
        *,
        row_number() over (
            partition by lakehouse_patterns_content order by lakehouse_patterns_content
        ) as lakehouse_patterns_rank
    from (
        select
            *,
            {{ whole.expression }} as lakehouse_patterns_content
        from {{ relation }}
    )
)
where lakehouse_patterns_rank = 1
        {%- endif -%}
    {%- else -%}
        {%- set rules = lakehouse_patterns._deduplicator_rules(
            relation, key, order_by, keep, nullable_key, on_null_key, content
        ) -%}
        {%- do lakehouse_patterns._require_past(past, keep) -%}
        {%- set helpers = rules.names + ['lakehouse_patterns_rank']
            + ([] if rules.content_columns else ['lakehouse_patterns_content']) -%}
select batch.* except ({{ helpers | join(', ') }})
from (
    {{ lakehouse_patterns._ranked_copies(rules, rules.content_columns) | indent(4) }}
) as batch
where
    batch.lakehouse_patterns_rank = 1
        {%- if past %}
            {%- set date = lakehouse_patterns.quoted_name(past.date_column) %}
    and not exists (
        select 1
        from (
            select
                {%- for expression in rules.expressions %}
                {{ expression }} as {{ rules.names[loop.index0] }},
                {%- endfor %}
                {{ date }} as lakehouse_patterns_date
            from {{ past.relation }}
            where {{ date }} >= (select date_sub(min({{ date }}), {{ past.days }}) from {{ relation }})
        ) as past
        where
            past.lakehouse_patterns_date < batch.{{ date }}
            and past.lakehouse_patterns_date >= date_sub(batch.{{ date }}, {{ past.days }})
            {%- for name in rules.names %}
            and past.{{ name }} {{ '<=>' if rules.expressions[loop.index0] in rules.nullable else '=' }} batch.{{ name }}
            {%- endfor %}
    )
        {%- endif %}
    {%- endif -%}
{%- endmacro %}

{% macro windowed_deduplicator_flags(
    relation, key, order_by, keep='first', nullable_key=none, on_null_key='fail', content=none
) %}
    {{ return(adapter.dispatch('windowed_deduplicator_flags', 'lakehouse_patterns')(
        relation, key, order_by, keep, nullable_key, on_null_key, content
    )) }}
{% endmacro %}

{% macro default__windowed_deduplicator_flags(relation, key, order_by, keep, nullable_key, on_null_key, content) %}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.known_types(relation), ['duplicate_as'], 'windowed_deduplicator_flags'
    ) -%}
    {%- set rules = lakehouse_patterns._deduplicator_rules(
        relation, key, order_by, keep, nullable_key, on_null_key, content
    ) -%}
select
    * except ({{ (rules.names + ['lakehouse_patterns_content', 'lakehouse_patterns_rank']) | join(', ') }}),
    case
        when lakehouse_patterns_rank = 1 then cast(null as string)
        when row_number() over (
            partition by {{ rules.names | join(', ') }}, lakehouse_patterns_content
            order by lakehouse_patterns_rank
        ) > 1 then 'exact'
        else 'same_key'
    end as duplicate_as
from (
    {{ lakehouse_patterns._ranked_copies(rules, none) | indent(4) }}
)
{%- endmacro %}

{% macro windowed_deduplicator_null_keys(relation, key, nullable_key=none) %}
    {{ return(adapter.dispatch('windowed_deduplicator_null_keys', 'lakehouse_patterns')(relation, key, nullable_key)) }}
{% endmacro %}

{% macro default__windowed_deduplicator_null_keys(relation, key, nullable_key) %}
    {%- set required = lakehouse_patterns._required_key(key, nullable_key) -%}
select *
from {{ relation }}
where {{ lakehouse_patterns._any_is_null(required) }}
{%- endmacro %}

{% macro _deduplicator_rules(relation, key, order_by, keep, nullable_key, on_null_key, content) %}
    {%- set order = lakehouse_patterns.as_list(order_by) -%}
    {%- set required = lakehouse_patterns._required_key(key, nullable_key) -%}
    {%- do lakehouse_patterns.require_one_of('keep', keep, ['first', 'last']) -%}
    {%- do lakehouse_patterns.require_one_of('on_null_key', on_null_key, ['fail', 'quarantine']) -%}
    {%- do lakehouse_patterns.require(
        order, 'windowed_deduplicator needs order_by, expressions that say which row comes first, got ' ~ order_by
    ) -%}
    {%- for expression in order -%}
        {%- do lakehouse_patterns.require(
            (expression | string | lower).split()[-1] not in ['asc', 'desc', 'last'],
            "order_by takes expressions without asc or desc, keep says which end is kept, got '" ~ expression ~ "'"
        ) -%}
        {%- do lakehouse_patterns.require(
            not modules.re.fullmatch('[0-9]+', expression | string),
            "order_by '" ~ expression ~ "' is a constant: with it the kept row is arbitrary; pass a column"
        ) -%}
    {%- endfor -%}
    {%- set expressions = lakehouse_patterns.as_list(key) -%}
    {%- set types = lakehouse_patterns.known_types(relation) -%}
    {%- do lakehouse_patterns.require_sortable(types, expressions, 'key') -%}
    {%- do lakehouse_patterns.require_sortable(types, order, 'order_by') -%}
    {%- set whole = lakehouse_patterns._deduplicator_content(relation, content) -%}
    {%- set names = [] -%}
    {%- for expression in expressions -%}
        {%- do names.append('lakehouse_patterns_key_' ~ loop.index) -%}
    {%- endfor -%}
    {{ return({
        'relation': relation,
        'expressions': expressions,
        'names': names,
        'nullable': lakehouse_patterns.as_list(nullable_key),
        'required': required,
        'order': order,
        'keep': keep,
        'on_null_key': on_null_key,
        'content': whole.expression,
        'content_is_text': whole.is_text,
        'content_columns': whole.columns
    }) }}
{% endmacro %}

{% macro _deduplicator_content(relation, content) %}
    {#-
        {expression, is_text, columns}: whether the expression is the JSON of the whole row, and the columns of which it
        is the struct, if they are known and Spark can sort them all.
    -#}
    {%- if content is not none -%}
        {{ return({'expression': content, 'is_text': false, 'columns': none}) }}
    {%- endif -%}
    {%- set columns, has_text = [], [] -%}
    {%- for name, type in lakehouse_patterns.known_types(relation).items() -%}
        {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
        {%- if not lakehouse_patterns.is_sortable(type) -%}
            {%- do has_text.append(name) -%}
            {%- set quoted = lakehouse_patterns.json_text('struct(' ~ quoted ~ ')') ~ ' as ' ~ quoted -%}
        {%- endif -%}
        {%- do columns.append(quoted) -%}
    {%- endfor -%}
    {%- if not columns -%}
        {{ return({'expression': lakehouse_patterns.json_text('struct(*)'), 'is_text': true, 'columns': none}) }}
    {%- endif -%}
    {{ return({
        'expression': 'struct(' ~ (columns | join(', ')) ~ ')' if has_text else 'struct(*)',
        'is_text': false,
        'columns': none if has_text else columns
    }) }}
{% endmacro %}

{% macro _required_key(key, nullable_key) %}
    {#- Validate the arguments and return the key's expressions that must not be NULL. -#}
    {%- set expressions = lakehouse_patterns.as_list(key) -%}
    {%- do lakehouse_patterns.require(expressions, 'a key is an expression or a list of them, got ' ~ key) -%}
    {%- for expression in lakehouse_patterns.as_list(nullable_key) -%}
        {%- do lakehouse_patterns.require(
            expression in expressions,
            "nullable_key '" ~ expression ~ "' is no part of the key " ~ (expressions | join(', '))
        ) -%}
    {%- endfor -%}
    {{ return(expressions | reject('in', lakehouse_patterns.as_list(nullable_key)) | list) }}
{% endmacro %}

{% macro _require_past(past, keep) %}
    {%- if past -%}
        {%- do lakehouse_patterns.require(past is mapping, 'past is {relation, date_column, days}, got ' ~ past) -%}
        {%- do lakehouse_patterns.require_known_keys('past', past, ['relation', 'date_column', 'days']) -%}
        {%- do lakehouse_patterns.require(
            past.relation and past.date_column and past.days is integer and past.days >= 1,
            'past needs a relation, a date_column that it has in common with the batch, and days, 1 or more, got ' ~ past
        ) -%}
        {%- do lakehouse_patterns.require(
            keep == 'first',
            "past needs keep='first', got '" ~ keep ~ "': only the merger replaces rows that are already written"
        ) -%}
    {%- endif -%}
{% endmacro %}

{% macro _any_is_null(expressions) %}
    {{ return((expressions or ['true']) | join(' is null or ') ~ ' is null') }}
{% endmacro %}

{% macro _ranked_copies(rules, content_columns) %}
    {#-
        Return each row of the relation with its key, its content and its rank among the rows of the key. With
        `content_columns` the rows are ordered by these columns and have no content: a struct of the whole row would
        double what Spark shuffles and sorts.
    -#}
    {%- set direction = {'first': ' asc nulls last', 'last': ' desc nulls last'}[rules.keep] -%}
    {%- set order = [] -%}
    {%- for expression in rules.order -%}
        {%- do order.append(lakehouse_patterns._finite_or_null_sql(expression)) -%}
    {%- endfor -%}
    {%- if rules.content_is_text -%}
        {#- NULL is the least, as it is in a struct; in JSON it would come after texts and numbers. -#}
        {%- do order.append("replace(lakehouse_patterns_content, ':null', ': ')") -%}
    {%- endif -%}
    {%- set contents, of_content = ['lakehouse_patterns_content'], direction -%}
    {%- if content_columns -%}
        {#- NULL is the least, as it is in a struct. -#}
        {%- set contents = content_columns -%}
        {%- set of_content = {'first': ' asc nulls first', 'last': ' desc nulls last'}[rules.keep] -%}
    {%- endif -%}
select
    *,
    row_number() over (
        partition by {{ rules.names | join(', ') }}
        order by {{ order | join(direction ~ ', ') }}{{ direction }}, {{ contents | join(of_content ~ ', ') }}
            {{- of_content }}
    ) as lakehouse_patterns_rank
from (
    select
        *,
        {%- for expression in rules.expressions %}
        {{ lakehouse_patterns._checked_key(rules, expression) }} as {{ rules.names[loop.index0] }}
            {{- ',' if not (content_columns and loop.last) }}
        {%- endfor %}
        {%- if not content_columns %}
        {{ rules.content }} as lakehouse_patterns_content
        {%- endif %}
    from {{ rules.relation }}
    {%- if rules.on_null_key == 'quarantine' and rules.required %}
    where not ({{ lakehouse_patterns._any_is_null(rules.required) }})
    {%- endif %}
)
{%- endmacro %}

{% macro _checked_key(rules, expression) %}
    {#- A key expression that fails the statement on NULL: the key is always computed, so no plan skips the check. -#}
    {%- if rules.on_null_key == 'fail' and expression in rules.required -%}
        coalesce(
            {{ expression }},
            raise_error({{ lakehouse_patterns.text_literal(
                'lakehouse_patterns: a row has NULL in its key (' ~ expression
                ~ '); correct the source, or quarantine such rows with on_null_key: quarantine'
            ) }})
        )
    {%- else -%}
        {{ expression }}
    {%- endif -%}
{%- endmacro %}
